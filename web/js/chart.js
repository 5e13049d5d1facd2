// Several runs beside each other (Chart of reports/comparison.py): a row per run, a column of bars per measure.
import { made } from "./elements.js";
import { say, translated } from "./words.js";

const HEAD = 90; // pixels, with the remark
const ROW = 40;

export class ChartView {
  constructor() {
    this.element = made("div", "specar-chart widget-expands"); // the new renderer gives such widgets the free space
  }

  show({ heads, rows, remark }) {
    this.height = HEAD + ROW * rows.length;
    this.element.replaceChildren();
    const table = made("table", "", this.element);
    const head = made("tr", "", made("thead", "", table));
    for (const [name, unit] of [["", ""], ...heads, ["quality", ""]]) {
      const cell = made("th", "", head);
      cell.textContent = translated(name);
      made("div", "specar-faint", cell).textContent = translated(unit);
    }
    const body = made("tbody", "", table);
    for (const row of rows) this.add(row, body);
    made("div", "specar-faint", this.element).textContent = translated(remark);
  }

  add({ name, detail, bars, fidelity, exact, chosen }, body) {
    const line = made("tr", chosen ? "specar-chosen" : "", body);
    const label = made("td", "", line);
    label.textContent = chosen ? say("{name} (chosen)", { name }) : translated(name);
    made("div", "specar-faint", label).textContent = translated(detail);
    for (const bar of bars) {
      const cell = made("td", "", line);
      cell.textContent = bar?.text ?? "-";
      made("div", exact ? "specar-bar" : "specar-bar specar-drifts", cell).style.width = `${100 * (bar?.share ?? 0)}%`;
    }
    made("td", "", line).textContent = translated(fidelity);
  }
}
