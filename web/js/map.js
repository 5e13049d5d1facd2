// The acceptance map on its node: the picture, and below it the run's report or the numbers of the token pointed at.
import { describeToken } from "./tokens.js";

const HINT = "Point at a token to see its values.";
const GONE = "The server no longer has this map (it was restarted, or cannot be reached). Run again.";
const UNWRITTEN = "The map could not be written; see ComfyUI's log.";
const STEPS = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
const SVG = "http://www.w3.org/2000/svg";

function made(tag, className, parent, attributes = {}) {
  const element = tag === "svg" || tag === "rect" ? document.createElementNS(SVG, tag) : document.createElement(tag);
  element.setAttribute("class", className);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  parent?.append(element);
  return element;
}

export class MapView {
  /** fetchFile: async ({filename, subfolder, type}) -> Response; addressOf: the same -> its URL. */
  constructor({ fetchFile, addressOf }) {
    this.fetchFile = fetchFile;
    this.addressOf = addressOf;
    this.shown = { pictures: [], numbers: [] };
    this.page = 0;
    this.build();
  }

  build() {
    this.element = made("div", "specar-map widget-expands"); // the new renderer gives such widgets the free space
    this.pages = made("div", "specar-pages", this.element);
    for (const [text, step, label] of [["‹", -1, "previous image"], ["›", 1, "next image"]]) {
      const button = made("button", "specar-turn", this.pages, { type: "button", "aria-label": label });
      button.textContent = text;
      button.addEventListener("click", () => this.turn(step));
    }
    this.pageText = made("span", "specar-page");
    this.pages.firstChild.after(this.pageText);

    this.picture = made("div", "specar-picture", this.element, {
      tabindex: "0", role: "img", "aria-label": "acceptance map", "aria-keyshortcuts": Object.keys(STEPS).join(" "),
    });
    this.image = made("img", "specar-image", this.picture, { alt: "", draggable: "false" });
    this.frame = made("svg", "specar-frame", this.picture, { preserveAspectRatio: "xMidYMid meet" });
    this.mark = made("rect", "specar-mark", this.frame);
    this.image.addEventListener("load", () => this.loaded());
    this.image.addEventListener("error", () => this.close());
    this.picture.addEventListener("pointermove", (event) => this.point(event));
    this.picture.addEventListener("pointerdown", (event) => this.point(event));
    this.picture.addEventListener("pointerleave", () => this.select(null));
    this.picture.addEventListener("keydown", (event) => this.walk(event));

    this.text = made("div", "specar-text", this.element, { "aria-live": "polite" });
  }

  /** pictures, numbers: files of ComfyUI's temp folder, one of each per picture (none, if they could not be written). */
  show({ pictures, numbers, report }) {
    this.shown = { pictures, numbers };
    this.report = report;
    this.pages.hidden = pictures.length < 2;
    this.open(Math.min(this.page, Math.max(pictures.length - 1, 0)));
  }

  turn(step) {
    const count = this.shown.pictures.length;
    this.open((this.page + step + count) % count);
  }

  open(page) {
    this.page = page;
    this.data = null;
    if (!this.shown.pictures.length) {
      this.image.removeAttribute("src");
      return this.close(UNWRITTEN);
    }
    this.pageText.textContent = `image ${page + 1} of ${this.shown.pictures.length}`;
    this.select(null);
    this.image.src = this.addressOf(this.shown.pictures[page]);
    this.read(this.shown.numbers[page]);
  }

  async read(file) {
    let data = null;
    try {
      const response = file && (await this.fetchFile(file));
      if (response?.ok) data = await response.json();
    } catch {
      // No server: told below, like a file that is not there.
    }
    if (file !== this.shown.numbers[this.page]) return; // another picture was chosen meanwhile
    this.data = data;
    if (data) this.select(null);
    else this.close();
  }

  close(reason = GONE) {
    this.data = null;
    this.select(null, reason);
  }

  loaded() {
    this.frame.setAttribute("viewBox", `0 0 ${this.image.naturalWidth} ${this.image.naturalHeight}`);
  }

  /** The token under the pointer; the picture is as large as fits into its box, in the middle. */
  point(event) {
    if (!this.data) return;
    const box = this.picture.getBoundingClientRect(); // as seen on the screen, however far the canvas is zoomed
    const { naturalWidth, naturalHeight } = this.image;
    const scale = Math.min(box.width / naturalWidth, box.height / naturalHeight);
    const x = (event.clientX - box.left - box.width / 2) / scale + naturalWidth / 2;
    const y = (event.clientY - box.top - box.height / 2) / scale + naturalHeight / 2;
    const [width, height] = this.data.map;
    const row = Math.floor((y / height) * this.data.rows);
    const column = Math.floor((x / width) * this.data.cols);
    const inside = row >= 0 && row < this.data.rows && column >= 0 && column < this.data.cols;
    const token = inside ? row * this.data.cols + column : null;
    if (token !== this.token) this.select(token);
  }

  walk(event) {
    const step = STEPS[event.key];
    if (!step || !this.data) return;
    event.preventDefault();
    event.stopPropagation(); // the arrow keys move selected nodes
    const { rows, cols } = this.data;
    const [row, column] = this.token === null ? [0, 0] : [
      (Math.floor(this.token / cols) + step[0] + rows) % rows, ((this.token % cols) + step[1] + cols) % cols,
    ];
    this.select(row * cols + column);
  }

  /** Marks a token and tells its numbers; null: none, the report is told. */
  select(token, hint = this.data ? HINT : "") {
    this.token = token;
    this.mark.style.display = token === null ? "none" : "";
    this.text.replaceChildren();
    if (token === null) {
      made("div", "specar-hint", this.text).textContent = hint;
      made("div", "specar-report", this.text).textContent = this.report;
      return;
    }
    const { rows, cols, map: [width, height] } = this.data;
    const place = { x: ((token % cols) * width) / cols, y: (Math.floor(token / cols) * height) / rows,
                    width: width / cols, height: height / rows };
    for (const [name, value] of Object.entries(place)) this.mark.setAttribute(name, value);
    const { title, pairs } = describeToken(this.data, token);
    made("div", "specar-title", this.text).textContent = title;
    const list = made("dl", "specar-pairs", this.text);
    for (const [name, value] of pairs) {
      const pair = made("div", "specar-pair", list);
      made("dt", "", pair).textContent = name;
      made("dd", "", pair).textContent = value;
    }
  }
}
