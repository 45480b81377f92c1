// What every page can do by itself: sort tables, save lists as CSV, select images, and show a map. Nothing is fetched.
"use strict";
(() => {
  const read = (element) => JSON.parse(element.textContent);
  const colors = 7;
  const color = (i) => getComputedStyle(document.documentElement).getPropertyValue(`--c${i % colors}`).trim();

  // ---- tables: a header is a button that sorts by its column
  const value = (row, column) => {
    const cell = row.cells[column];
    const text = cell.dataset.value ?? cell.textContent;
    return text !== "" && !Number.isNaN(Number(text)) ? Number(text) : text;
  };
  const compare = (a, b) => {
    if (typeof a === "number" && typeof b === "number") return a - b;
    if (typeof a !== typeof b) return typeof a === "number" ? -1 : 1;
    return a.localeCompare(b, undefined, { numeric: true });
  };
  for (const button of document.querySelectorAll("th button")) {
    button.addEventListener("click", () => {
      const header = button.closest("th");
      const body = header.closest("table").tBodies[0];
      const sign = header.getAttribute("aria-sort") === "ascending" ? -1 : 1;
      for (const other of header.parentElement.cells) other.removeAttribute("aria-sort");
      header.setAttribute("aria-sort", sign > 0 ? "ascending" : "descending");
      const column = header.cellIndex;
      body.append(...[...body.rows].sort((a, b) => sign * compare(value(a, column), value(b, column))));
    });
  }

  // ---- lists as CSV
  const csv = (rows) => rows.map((row) => row.map((cell) => {
    // A spreadsheet would compute text that begins like a formula.
    const formula = typeof cell === "string" && /^[=+\-@\t\r\n]/.test(cell);
    const text = cell === null ? "" : (formula ? "'" : "") + String(cell);
    return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  }).join(",")).join("\r\n") + "\r\n";
  const save = (name, content, type) => {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([content], { type }));
    link.download = name;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  };
  for (const button of document.querySelectorAll("button.download")) {
    button.addEventListener("click", () => save(button.dataset.name, csv(read(button.nextElementSibling)), "text/csv"));
  }

  // ---- a selection of images, saved as CSV or as a script that moves their files and deletes nothing
  // Paths are bytes, one character each, since file names need not be UTF-8.
  const bytes = (percent) => percent.replace(/%(..)/g, (_, digits) => String.fromCharCode(parseInt(digits, 16)));
  const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;
  // A path without its leading slash and its steps upwards: where the file goes below the folder of the selection.
  const below = (path) => path.split("/").filter((part) => part && part !== "." && part !== "..").join("/");
  class Selection {
    constructor(bar) {
      this.bar = bar;
      this.data = read(bar.querySelector("script"));
      this.chosen = new Set();
      this.listeners = [];
      const save = { csv: () => this.saveCsv(), script: () => this.saveScript(), clear: () => this.set([...this.chosen], false) };
      for (const button of bar.querySelectorAll("[data-save]")) button.addEventListener("click", save[button.dataset.save]);
      document.addEventListener("change", (event) => {
        if (event.target.dataset.id) this.set([Number(event.target.dataset.id)], event.target.checked);
      });
      document.querySelector("[data-select=copies]")?.addEventListener("click", () =>
        this.set([...document.querySelectorAll(".duplicates li + li [data-id]")].map((box) => Number(box.dataset.id)), true));
      document.addEventListener("keydown", (event) => this.key(event));
      this.set([...document.querySelectorAll("[data-id]:checked")].map((box) => Number(box.dataset.id)), true);
    }

    set(ids, yes) {
      for (const id of ids) yes ? this.chosen.add(id) : this.chosen.delete(id);
      for (const box of document.querySelectorAll("[data-id]")) box.checked = this.chosen.has(Number(box.dataset.id));
      this.bar.hidden = this.chosen.size === 0;
      this.bar.querySelector("[data-count]").textContent = this.chosen.size.toLocaleString("en");
      for (const listener of this.listeners) listener();
    }

    toggle(id) { this.set([id], !this.chosen.has(id)); }

    // Arrow keys walk over the check boxes of all lists; space is the box's own key; Enter opens the file.
    key(event) {
      const box = event.target.closest?.("[data-id]");
      if (!box || event.ctrlKey || event.metaKey || event.altKey) return;
      const boxes = [...document.querySelectorAll("[data-id]")].filter((one) => one.offsetParent);
      const at = boxes.indexOf(box);
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (step) boxes[at + step]?.focus();
      else if (event.key === "ArrowDown" || event.key === "ArrowUp") this.vertical(boxes, at, event.key === "ArrowDown" ? 1 : -1);
      else if (event.key === "Enter") box.parentElement.querySelector("a")?.click();
      else return;
      event.preventDefault();
    }

    // The nearest of the next line of pictures.
    vertical(boxes, at, sign) {
      const from = boxes[at].getBoundingClientRect();
      let best = null, least = [Infinity, Infinity];
      for (let i = at + sign; i >= 0 && i < boxes.length; i += sign) {
        const to = boxes[i].getBoundingClientRect();
        const [down, aside] = [sign * (to.top - from.top), Math.abs(to.left - from.left)];
        if (down < 8 || down > least[0] + 8) continue;
        if (down < least[0] - 8 || aside < least[1]) [best, least] = [boxes[i], [down, aside]];
      }
      best?.focus();
    }

    ids() { return [...this.chosen].sort((a, b) => a - b); }

    file(id) { return bytes(this.data.files[id] ?? encodeURIComponent(this.data.names[id])); }

    saveCsv() {
      const decode = (text) => new TextDecoder().decode(Uint8Array.from(text, (letter) => letter.charCodeAt(0)));
      const { root, names } = this.data;
      const path = (id) => (this.file(id).startsWith("/") ? this.file(id) : `${bytes(root)}/${this.file(id)}`);
      const rows = this.ids().map((id) => (root === null ? [names[id]] : [names[id], decode(path(id))]));
      save("selected.csv", csv([root === null ? ["image"] : ["image", "file"], ...rows]), "text/csv");
    }

    saveScript() {
      const root = bytes(this.data.root), files = [...new Set(this.ids().map((id) => this.file(id)))];
      const moves = files.map((file) => {
        const from = file.startsWith("/") ? file : `./${file}`, to = below(file);
        return `move ${quoted(from)} ${quoted(to)} ${quoted(to.split("/").slice(0, -1).join("/"))}`;
      });
      const script = `#!/bin/sh
# Move ${files.length} selected file(s) to the folder given as argument, below which their own folders are kept.
# Nothing is deleted or overwritten. Usage: sh move-selected.sh [FOLDER]
set -u
folder=${quoted(`${root}-selected`)}
if [ $# -gt 0 ]; then folder=$1; fi
case $folder in /*) ;; *) folder=$PWD/$folder ;; esac
cd -- ${quoted(root)} || exit 1
moved=0 left=0
move() {
  if [ ! -e "$1" ] && [ ! -L "$1" ]; then reason="not found"
  elif [ -e "$folder/$2" ] || [ -L "$folder/$2" ]; then reason="the target exists"
  elif mkdir -p -- "$folder/$3" && mv -- "$1" "$folder/$2"; then moved=$((moved + 1)); return
  else reason="it cannot be moved"
  fi
  left=$((left + 1))
  printf 'Not moved (%s): %s\\n' "$reason" "$1" >&2
}
${moves.join("\n")}
printf '%s moved to %s, %s not moved.\\n' "$moved" "$folder" "$left"
[ "$left" -eq 0 ]
`;
      save("move-selected.sh", Uint8Array.from(script, (letter) => letter.charCodeAt(0)), "application/x-sh");
    }
  }
  const bar = document.querySelector(".selection");
  const selection = bar ? new Selection(bar) : null;

  // ---- a map: points with thumbnails, a filter, a pick with its neighbors; mouse, touch and keys alike
  class PointMap {
    constructor(figure) {
      this.figure = figure;
      this.data = read(figure.querySelector("script"));
      this.canvas = figure.querySelector("canvas");
      this.tip = figure.querySelector(".tip");
      this.chosen = "";
      this.grouping = this.data.groupings[0];
      this.at = -1;
      this.zoom = 1;
      this.center = [0.5, 0.5];
      this.pictures = this.control("pictures").checked;
      this.sheet = new Image();
      this.sheet.src = this.data.sheet.src;
      this.sheet.onload = () => this.pictures && this.draw();
      this.listen();
      new ResizeObserver(() => this.resize()).observe(this.canvas.parentElement);
      selection?.listeners.push(() => this.draw());
      matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
    }

    control(name) { return this.figure.querySelector(`[data-control=${name}]`); }

    listen() {
      const { canvas } = this;
      const filters = this.figure.querySelectorAll("[data-control=filter]");
      const filter = (value) => {
        this.chosen = value;
        this.hide();
        this.draw();
        this.figure.querySelector("[data-shown]").textContent = this.visible().length.toLocaleString("en");
      };
      for (const one of filters) one.addEventListener("change", () => filter(one.value));
      this.control("grouping")?.addEventListener("change", (event) => {
        this.grouping = this.data.groupings[Number(event.target.value)];
        for (const part of this.figure.querySelectorAll("[data-grouping]")) part.hidden = part.dataset.grouping !== event.target.value;
        for (const one of filters) one.value = "";
        filter("");
      });
      this.control("pictures").addEventListener("change", (event) => {
        this.pictures = event.target.checked;
        this.draw();
      });
      this.control("nearer").addEventListener("click", () => this.scale(1.6));
      this.control("farther").addEventListener("click", () => this.scale(1 / 1.6));
      let held = null;
      canvas.addEventListener("pointerdown", (event) => { held = [event.offsetX, event.offsetY]; });
      canvas.addEventListener("pointermove", (event) => {
        if (held && event.buttons && this.zoom > 1) {
          this.center[0] -= (event.offsetX - held[0]) / (this.width * this.zoom);
          this.center[1] += (event.offsetY - held[1]) / (this.height * this.zoom);
          held = [event.offsetX, event.offsetY];
          this.hide();
          this.draw();
        } else this.show(this.nearest(event.offsetX, event.offsetY));
      });
      canvas.addEventListener("pointerleave", () => this.hide());
      canvas.addEventListener("click", (event) => {
        const found = this.nearest(event.offsetX, event.offsetY);
        if (found >= 0) this.pick(found);
      });
      canvas.addEventListener("focus", () => this.at < 0 && this.show(this.visible()[0] ?? -1));
      canvas.addEventListener("blur", () => this.hide());
      canvas.addEventListener("keydown", (event) => this.key(event));
    }

    key(event) {
      const steps = { ArrowRight: [1, 0], ArrowLeft: [-1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
      if (event.key in steps) this.show(this.towards(...steps[event.key]));
      else if (event.key === "Enter" && this.at >= 0) this.pick(this.at);
      else if (event.key === " " && this.at >= 0 && this.data.ids) selection?.toggle(this.data.ids[this.at]);
      else if (event.key === "+") this.scale(1.6);
      else if (event.key === "-") this.scale(1 / 1.6);
      else if (event.key === "Escape") this.hide();
      else return;
      event.preventDefault();
    }

    scale(factor) {
      this.zoom = Math.min(40, Math.max(1, this.zoom * factor));
      if (this.at >= 0) this.center = [this.data.x[this.at], this.data.y[this.at]];
      if (this.zoom === 1) this.center = [0.5, 0.5];
      this.hide();
      this.draw();
    }

    resize() {
      const width = this.canvas.parentElement.clientWidth;
      if (!width || width === this.width) return;
      const ratio = window.devicePixelRatio || 1;
      this.width = width;
      this.height = Math.round(Math.min(width * 0.72, 620));
      this.canvas.width = width * ratio;
      this.canvas.height = this.height * ratio;
      this.canvas.style.height = `${this.height}px`;
      this.canvas.getContext("2d").setTransform(ratio, 0, 0, ratio, 0, 0);
      this.draw();
    }

    place(i) {
      const margin = this.pictures ? 4 + this.stampSize() / 2 : 14;
      const x = (this.data.x[i] - this.center[0]) * this.zoom + 0.5;
      const y = 0.5 - (this.data.y[i] - this.center[1]) * this.zoom;
      return [margin + x * (this.width - 2 * margin), margin + y * (this.height - 2 * margin)];
    }

    group(i) { return this.grouping.of[i]; }

    shown(i) { return this.chosen === "" || this.group(i) === Number(this.chosen); }

    visible() { return this.data.x.map((_, i) => i).filter((i) => this.shown(i)); }

    nearest(x, y) {
      let best = -1, least = 24 ** 2;
      for (const i of this.visible()) {
        const [px, py] = this.place(i);
        const distance = (px - x) ** 2 + (py - y) ** 2;
        if (distance < least) [best, least] = [i, distance];
      }
      return best;
    }

    // The nearest point that lies in this direction, rather ahead than aside.
    towards(dx, dy) {
      if (this.at < 0) return this.visible()[0] ?? -1;
      const [x, y] = this.place(this.at);
      let best = this.at, least = Infinity;
      for (const i of this.visible()) {
        const [px, py] = this.place(i);
        const ahead = (px - x) * dx + (py - y) * dy;
        const aside = Math.abs((px - x) * dy) + Math.abs((py - y) * dx);
        if (ahead > 0.5 && ahead + 2 * aside < least) [best, least] = [i, ahead + 2 * aside];
      }
      return best;
    }

    draw() {
      if (!this.width) return;
      const pen = this.canvas.getContext("2d");
      pen.clearRect(0, 0, this.width, this.height);
      const faded = getComputedStyle(document.documentElement).getPropertyValue("--line").trim();
      const all = this.data.x.map((_, i) => i);
      for (const i of all) if (!this.shown(i)) this.mark(pen, i, faded);
      const tones = Array.from({ length: colors }, (_, i) => color(i));
      for (const i of all) if (this.shown(i)) this[this.pictures ? "stamp" : "mark"](pen, i, tones[this.group(i) % colors]);
      const ink = getComputedStyle(document.documentElement).getPropertyValue("--ink").trim();
      for (const i of all) if (selection?.chosen.has(this.data.ids?.[i])) this.ring(pen, i, tones[1]);
      if (this.at >= 0) this.ring(pen, this.at, ink);
    }

    ring(pen, i, tone) {
      const [x, y] = this.place(i);
      pen.lineWidth = 3;
      pen.strokeStyle = tone;
      pen.beginPath();
      pen.arc(x, y, this.pictures ? 0.72 * this.stampSize() : 9, 0, 7);
      pen.stroke();
    }

    // Groups differ in shape as well as in color.
    mark(pen, i, tone) {
      const [x, y] = this.place(i), r = 4, kind = Math.floor(this.group(i) / colors) % 4;
      pen.fillStyle = tone;
      pen.beginPath();
      if (kind === 0) pen.arc(x, y, r, 0, 7);
      else if (kind === 1) pen.rect(x - r + 0.5, y - r + 0.5, 2 * r - 1, 2 * r - 1);
      else if (kind === 2) { pen.moveTo(x, y - r - 1); pen.lineTo(x + r + 1, y + r); pen.lineTo(x - r - 1, y + r); }
      else { pen.moveTo(x, y - r - 1); pen.lineTo(x + r + 1, y); pen.lineTo(x, y + r + 1); pen.lineTo(x - r - 1, y); }
      pen.fill();
    }

    // Many pictures are small until the map is enlarged.
    stampSize() {
      const room = Math.min(620, 0.7 * this.width);
      return Math.min(64, Math.max(12, Math.min(34, room / Math.sqrt(this.data.x.length))) * this.zoom ** 0.5);
    }

    stamp(pen, i, tone) {
      const { side, columns } = this.data.sheet, [x, y] = this.place(i), size = this.stampSize();
      pen.fillStyle = tone;
      pen.fillRect(x - size / 2 - 2, y - size / 2 - 2, size + 4, size + 4);
      pen.drawImage(this.sheet, (i % columns) * side, Math.floor(i / columns) * side, side, side,
        x - size / 2, y - size / 2, size, size);
    }

    thumb(i) {
      const { columns, rows, src } = this.data.sheet;
      const picture = document.createElement("div");
      picture.className = "thumb";
      picture.style.backgroundImage = `url(${src})`;
      picture.style.backgroundSize = `${columns * 100}% ${rows * 100}%`;
      const part = (at, count) => (count > 1 ? (100 * at) / (count - 1) : 0);
      picture.style.backgroundPosition = `${part(i % columns, columns)}% ${part(Math.floor(i / columns), rows)}%`;
      picture.setAttribute("role", "img");
      picture.setAttribute("aria-label", this.data.name[i]);
      return picture;
    }

    words(i) {
      const text = document.createElement("div");
      const strong = document.createElement("b");
      const name = this.data.name[i], folder = name.split("/").slice(0, -1).join("/"), group = this.grouping.names[this.group(i)];
      strong.textContent = name.split("/").at(-1);
      text.append(strong);
      for (const line of new Set([folder, this.grouping.names.length > 1 ? group : ""])) {
        const span = document.createElement("span");
        span.textContent = line;
        if (line) text.append(span);
      }
      return text;
    }

    show(i) {
      if (i === this.at) return;
      this.at = i;
      this.tip.hidden = i < 0;
      if (i >= 0) {
        this.tip.replaceChildren(this.thumb(i), this.words(i));
        const [x, y] = this.place(i);
        this.tip.style.left = `${Math.max(0, Math.min(x + 14, this.width - this.tip.offsetWidth))}px`;
        const below = y + 14 + this.tip.offsetHeight < this.height;
        this.tip.style.top = `${below ? y + 14 : Math.max(0, y - 14 - this.tip.offsetHeight)}px`;
        this.canvas.setAttribute("aria-label", `${this.grouping.names[this.group(i)]}: ${this.data.name[i]}`);
      }
      this.draw();
    }

    hide() { this.show(-1); }

    pick(i) {
      const near = this.data.neighbors?.[i];
      const panel = this.figure.querySelector(".picked");
      if (!near || !panel) return;
      const title = document.createElement("p");
      title.textContent = `Nearest to ${this.data.name[i]}:`;
      const list = document.createElement("ul");
      list.className = "grid";
      for (const j of [i, ...near]) {
        const item = document.createElement("li");
        item.append(this.thumb(j), this.words(j));
        if (selection && this.data.ids) {
          const box = Object.assign(document.createElement("input"), { type: "checkbox", checked: selection.chosen.has(this.data.ids[j]) });
          box.dataset.id = this.data.ids[j];
          box.setAttribute("aria-label", `Select ${this.data.name[j]}`);
          item.append(box);
        }
        list.append(item);
      }
      panel.replaceChildren(title, list);
    }
  }

  // ---- one channel of every picture that has several
  for (const picker of document.querySelectorAll('select[data-control="channels"]')) {
    picker.addEventListener("change", () => {
      for (const image of document.querySelectorAll("img[data-channels]")) {
        image.dataset.composed ??= image.src;
        const channels = image.dataset.channels.split(" ");
        image.src = (picker.value !== "" && channels[Number(picker.value)]) || image.dataset.composed;
      }
    });
  }

  for (const figure of document.querySelectorAll("figure.map")) figure.map = new PointMap(figure);
})();
