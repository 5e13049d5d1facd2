// Elements of the page.

export function made(tag, className, parent, attributes = {}) {
  const element = Object.assign(document.createElement(tag), { className });
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  parent?.append(element);
  return element;
}
