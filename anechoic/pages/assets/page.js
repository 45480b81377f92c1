// What every page can do by itself: sort tables, save lists as CSV, and show a map. Nothing is fetched.
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
  for (const button of document.querySelectorAll("button.download")) {
    button.addEventListener("click", () => {
      const link = document.createElement("a");
      link.href = URL.createObjectURL(new Blob([csv(read(button.nextElementSibling))], { type: "text/csv" }));
      link.download = button.dataset.name;
      link.click();
      setTimeout(() => URL.revokeObjectURL(link.href), 1000);
    });
  }

  // ---- a map: points with thumbnails, a filter, a pick with its neighbors; mouse, touch and keys alike
  class PointMap {
    constructor(figure) {
      this.figure = figure;
      this.data = read(figure.querySelector("script"));
      this.canvas = figure.querySelector("canvas");
      this.tip = figure.querySelector(".tip");
      this.chosen = "";
      this.at = -1;
      this.zoom = 1;
      this.center = [0.5, 0.5];
      this.pictures = false;
      this.sheet = new Image();
      this.sheet.src = this.data.sheet.src;
      this.sheet.onload = () => this.pictures && this.draw();
      this.listen();
      new ResizeObserver(() => this.resize()).observe(this.canvas.parentElement);
      matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
    }

    control(name) { return this.figure.querySelector(`[data-control=${name}]`); }

    listen() {
      const { canvas } = this;
      this.control("filter")?.addEventListener("change", (event) => {
        this.chosen = event.target.value;
        this.hide();
        this.draw();
        this.figure.querySelector("[data-shown]").textContent = this.visible().length;
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
      const margin = 14;
      const x = (this.data.x[i] - this.center[0]) * this.zoom + 0.5;
      const y = 0.5 - (this.data.y[i] - this.center[1]) * this.zoom;
      return [margin + x * (this.width - 2 * margin), margin + y * (this.height - 2 * margin)];
    }

    shown(i) { return this.chosen === "" || this.data.group[i] === Number(this.chosen); }

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
      for (const i of all) if (this.shown(i)) this.pictures ? this.stamp(pen, i) : this.mark(pen, i, tones[this.data.group[i] % colors]);
      if (this.at >= 0) {
        const [x, y] = this.place(this.at);
        pen.lineWidth = 2.5;
        pen.strokeStyle = getComputedStyle(document.documentElement).getPropertyValue("--ink").trim();
        pen.beginPath();
        pen.arc(x, y, this.pictures ? 19 : 9, 0, 7);
        pen.stroke();
      }
    }

    // Groups differ in shape as well as in color.
    mark(pen, i, tone) {
      const [x, y] = this.place(i), r = 4, kind = Math.floor(this.data.group[i] / colors) % 4;
      pen.fillStyle = tone;
      pen.beginPath();
      if (kind === 0) pen.arc(x, y, r, 0, 7);
      else if (kind === 1) pen.rect(x - r + 0.5, y - r + 0.5, 2 * r - 1, 2 * r - 1);
      else if (kind === 2) { pen.moveTo(x, y - r - 1); pen.lineTo(x + r + 1, y + r); pen.lineTo(x - r - 1, y + r); }
      else { pen.moveTo(x, y - r - 1); pen.lineTo(x + r + 1, y); pen.lineTo(x, y + r + 1); pen.lineTo(x - r - 1, y); }
      pen.fill();
    }

    stamp(pen, i) {
      const { side, columns } = this.data.sheet, [x, y] = this.place(i), size = 28;
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
      const group = this.data.groups[this.data.group[i]], name = this.data.name[i];
      strong.textContent = group;
      text.append(strong, document.createElement("br"), name.startsWith(`${group}/`) ? name.slice(group.length + 1) : name);
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
        this.canvas.setAttribute("aria-label", `${this.data.groups[this.data.group[i]]}: ${this.data.name[i]}`);
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
        list.append(item);
      }
      panel.replaceChildren(title, list);
    }
  }
  for (const figure of document.querySelectorAll("figure.map")) figure.map = new PointMap(figure);
})();
