// The acceptance map on its node: the picture, its legend, and the run's report or the numbers of the token pointed at.
import { made } from "./elements.js";
import { describeToken } from "./tokens.js";
import { say, translated } from "./words.js";

const HINT = "Point at a token to see its values.";
const GONE = "The server no longer has this map (it was restarted, or cannot be reached). Run again.";
const UNWRITTEN = "The map could not be written; see ComfyUI's log.";
const STEPS = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };

export class MapView {
  height = 490; // pixels, at least

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
      const button = made("button", "specar-turn", this.pages, { type: "button", "aria-label": say(label) });
      button.textContent = text;
      button.addEventListener("click", () => this.turn(step));
    }
    this.pageText = made("span", "specar-page");
    this.pages.firstChild.after(this.pageText);

    this.picture = made("div", "specar-picture", this.element, {
      tabindex: "0", role: "img", "aria-label": say("acceptance map"), "aria-keyshortcuts": Object.keys(STEPS).join(" "),
    });
    // The file has a legend below the map, which is cut off here: the page draws it, in its own colours and language.
    this.sheet = made("div", "specar-sheet", this.picture);
    this.image = made("img", "specar-image", this.sheet, { alt: "", draggable: "false" });
    this.mark = made("div", "specar-mark", this.sheet);
    this.image.addEventListener("error", () => this.close());
    this.picture.addEventListener("pointermove", (event) => this.point(event));
    this.picture.addEventListener("pointerdown", (event) => this.point(event));
    this.picture.addEventListener("pointerleave", () => this.select(null));
    this.picture.addEventListener("keydown", (event) => this.walk(event));

    this.legend = made("div", "specar-legend", this.element);
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
    this.hint = "";
    if (!this.shown.pictures.length) {
      this.image.removeAttribute("src");
      return this.close(UNWRITTEN);
    }
    this.pageText.textContent = say("image {number} of {count}", { number: page + 1, count: this.shown.pictures.length });
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
    if (!data) return this.close();
    this.data = data;
    this.sheet.style.setProperty("--ratio", data.map[0] / data.map[1]);
    this.explain(data.legend);
    this.select(null);
  }

  close(reason = GONE) {
    this.data = null;
    this.hint = reason; // stays when the pointer leaves
    this.select(null);
  }

  /** The legend: what the colours mean. */
  explain({ title, lines }) {
    this.legend.replaceChildren();
    made("div", "specar-caption", this.legend).textContent = translated(title);
    for (const { colours, texts: [text, high] } of lines) {
      const line = made("div", "specar-line", this.legend);
      const bar = made("span", high ? "specar-scale" : "specar-swatch");
      bar.style.background = `linear-gradient(90deg, ${colours.map((colour) => `rgb(${colour})`)})`;
      const words = [text, high].filter(Boolean).map((each) => Object.assign(made("span", ""), { textContent: translated(each) }));
      line.append(...(high ? [words[0], bar, words[1]] : [bar, words[0]]));
    }
  }

  /** The token under the pointer. */
  point(event) {
    if (!this.data) return;
    const box = this.sheet.getBoundingClientRect(); // as seen on the screen, however far the canvas is zoomed
    const row = Math.floor(((event.clientY - box.top) / box.height) * this.data.rows);
    const column = Math.floor(((event.clientX - box.left) / box.width) * this.data.cols);
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
  select(token) {
    this.token = token;
    this.mark.style.display = token === null ? "none" : "";
    this.text.replaceChildren();
    if (token === null) {
      made("div", "specar-hint", this.text).textContent = say(this.data ? HINT : this.hint);
      made("div", "specar-report", this.text).textContent = this.report;
      return;
    }
    const { rows, cols } = this.data;
    const place = { left: (token % cols) / cols, top: Math.floor(token / cols) / rows, width: 1 / cols, height: 1 / rows };
    for (const [name, share] of Object.entries(place)) this.mark.style[name] = `${100 * share}%`;
    const { title, pairs } = describeToken(this.data, token);
    made("div", "specar-title", this.text).textContent = translated(title);
    const list = made("dl", "specar-pairs", this.text);
    for (const [name, value] of pairs) {
      const pair = made("div", "specar-pair", list);
      made("dt", "", pair).textContent = translated(name);
      made("dd", "", pair).textContent = value;
    }
  }
}
