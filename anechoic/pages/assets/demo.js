// The demo's picker: an object in one style is searched among the drawings of another style, by every encoder and block.
(() => {
  const root = document.getElementById("picker");
  if (!root) return;
  const data = JSON.parse(root.querySelector("script").textContent);
  const bytes = (text) => Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const numbers = (text) => new Uint16Array(bytes(text).buffer);
  const nearest = numbers(data.nearest), ranks = numbers(data.rank);
  const styles = data.styles.length, count = data.objects.length;
  const start = (search, from, to) => ((search * styles + from) * styles + to) * count;
  const make = (tag, options = {}, ...children) => {
    const element = Object.assign(document.createElement(tag), options);
    element.append(...children);
    return element;
  };

  // Each style's sheet is one picture; a tile shows a part of it.
  const css = make("style");
  css.textContent = data.sheets.map((sheet, style) => {
    const url = URL.createObjectURL(new Blob([bytes(sheet.split(",")[1])], { type: "image/webp" }));
    return `#picker .style-${style} { background-image: url(${url}); background-size: ${data.columns * 100}% ${data.rows * 100}%; }`;
  }).join("\n");
  document.head.append(css);
  const at = (tile, style, object) => {
    const number = data.tiles[object];
    const part = (index, parts) => (parts > 1 ? (100 * index) / (parts - 1) : 0);
    tile.classList.add("tile", `style-${style}`);
    tile.style.backgroundPosition =
      `${part(number % data.columns, data.columns)}% ${part(Math.floor(number / data.columns), data.rows)}%`;
    return tile;
  };
  const tile = (style, object) => {
    const picture = at(make("div"), style, object);
    picture.setAttribute("role", "img");
    picture.setAttribute("aria-label", `${data.objects[object]}, style ${data.styles[style]}`);
    picture.title = data.objects[object];
    return picture;
  };

  // ---- the query
  const choice = (label, chosen) => {
    const select = make("select");
    data.styles.forEach((name, i) => select.append(make("option", { value: i, textContent: name, selected: i === chosen })));
    return [select, make("label", {}, `${label} `, select)];
  };
  const [from, fromLabel] = choice("Style", 0);
  const [to, toLabel] = choice("find it among the drawings in", Math.min(2, styles - 1));
  const search = make("input", { type: "search", placeholder: "bee, cup, moon …" });
  const kind = make("select", {}, make("option", { value: "", textContent: "all kinds" }));
  data.kinds.forEach((name, i) => data.kind.includes(i) && kind.append(make("option", { value: i, textContent: name })));
  const another = make("button", { type: "button", className: "plain", textContent: "Another object" });
  const objects = make("div", { className: "objects" });
  objects.setAttribute("role", "group");
  objects.setAttribute("aria-label", "Objects to choose from");
  const answer = make("div");
  answer.setAttribute("aria-live", "polite");
  root.append(
    make("div", { className: "controls" }, fromLabel, toLabel),
    make("div", { className: "controls" }, make("label", {}, "Object ", search), make("label", {}, "Kind ", kind), another),
    objects, answer);

  // The page opens with an object that both networks find after their last block and neither after its first, if any.
  const layersOf = (encoder) => data.searches.map((one, i) => [one, i]).filter(([one]) => one.encoder === encoder).map(([, i]) => i);
  const rankOf = (number, i) => ranks[start(number, Number(from.value), Number(to.value)) + i];
  const pair = ["residual", "decayed"].map(layersOf);
  const opens = data.objects.findIndex((_, i) =>
    pair.every((layers) => rankOf(layers.at(-1), i) === 1 && rankOf(layers[1], i) > 1));
  let object = Math.max(0, opens);
  const buttons = data.objects.map((name, i) => {
    const button = make("button", { type: "button", title: name });
    button.setAttribute("aria-label", name);
    button.addEventListener("click", () => { object = i; show(); });
    return button;
  });
  objects.append(...buttons);
  const listed = () => data.objects.map((_, i) => i).filter((i) =>
    data.objects[i].toLowerCase().includes(search.value.trim().toLowerCase())
    && (kind.value === "" || data.kind[i] === Number(kind.value)));
  const filter = () => {
    const kept = new Set(listed());
    buttons.forEach((button, i) => { button.hidden = !kept.has(i); });
  };
  const redraw = () => {
    buttons.forEach((button, i) => { button.className = ""; at(button, Number(from.value), i); });
    show();
  };

  // ---- the results
  const encoders = [...new Set(data.searches.map((one) => one.encoder))];
  const words = {
    "raw pixels": "the drawing itself",
    untrained: "random initialization",
    residual: "plain shortcuts",
    decayed: "shortcuts that decay with depth",
  };
  const depth = Math.max(...data.searches.map((one) => one.layer));
  const cell = (number) => {
    const begin = start(number, Number(from.value), Number(to.value));
    const found = nearest[begin + object], rank = ranks[begin + object];
    const all = ranks.subarray(begin, begin + count);
    const share = (100 * all.reduce((sum, one) => sum + (one === 1), 0)) / count;
    const bar = make("i");
    bar.style.width = `${Math.min(100, share * 2)}%`;
    const label = rank === 1 ? "✓ found" : `rank ${rank.toLocaleString("en")}`;
    return make("td", { className: rank === 1 ? "found" : "", title: `nearest: ${data.objects[found]}` },
      tile(Number(to.value), found), make("div", { className: "rank", textContent: label }),
      make("div", { className: "share", textContent: `all: ${share.toFixed(1)} %` }),
      make("div", { className: "bar" }, bar));
  };
  const row = (encoder) => {
    const own = data.searches.map((one, i) => [one, i]).filter(([one]) => one.encoder === encoder);
    const head = make("th", { scope: "row" }, encoder, make("span", { textContent: words[encoder] ?? "" }));
    const line = make("tr", {}, head);
    // An encoder without blocks is shown under the last one, where it is compared.
    const blocks = own.length > 2 ? own : own.slice(-1);
    const layers = new Map(blocks.map(([one, i]) => [blocks.length > 1 ? one.layer : depth, i]));
    for (let layer = 0; layer <= depth; layer++) line.append(layers.has(layer) ? cell(layers.get(layer)) : make("td"));
    return line;
  };
  const show = () => {
    buttons.forEach((button, i) => button.setAttribute("aria-pressed", i === object));
    const [one, other] = [Number(from.value), Number(to.value)];
    if (one === other) {
      answer.replaceChildren(make("p", { textContent: "Choose two different styles." }));
      return;
    }
    const asked = (style, text) => make("figure", {}, tile(style, object), make("figcaption", {},
      make("b", { textContent: data.objects[object] }), `${text} ${data.styles[style]}`));
    const head = make("tr", {}, make("th"));
    for (let layer = 0; layer <= depth; layer++) head.append(make("th", { scope: "col", textContent: layer ? `block ${layer}` : "embedding" }));
    const caption = `The nearest drawing in the style ${data.styles[other]}, and the rank of the right one among ` +
      `${count.toLocaleString("en")}. all: share of all objects whose nearest drawing is the right one; bars end at 50 %.`;
    const table = make("table", {}, make("thead", {}, head), make("tbody", {}, ...encoders.map(row)));
    const scroll = make("div", { className: "scroll", tabIndex: 0 }, table);
    scroll.setAttribute("role", "region");
    scroll.setAttribute("aria-label", "What each encoder finds");
    answer.replaceChildren(make("div", { className: "asked" }, asked(one, "query: style"), asked(other, "target: style")),
      make("p", { className: "caption", textContent: caption }), scroll);
    requestAnimationFrame(() => { scroll.scrollLeft = scroll.scrollWidth; }); // a phone shows the last block first
  };

  from.addEventListener("change", redraw);
  to.addEventListener("change", show);
  search.addEventListener("input", filter);
  kind.addEventListener("change", filter);
  another.addEventListener("click", () => {
    const kept = listed();
    if (kept.length) object = kept[Math.floor(Math.random() * kept.length)];
    show();
    objects.scrollTop = buttons[object].offsetTop - objects.offsetTop - 60;
  });
  redraw();
  objects.scrollTop = buttons[object].offsetTop - objects.offsetTop - 60;
})();

// While a fresh pair is trained, live.js beside the page holds its latest curve.
(() => {
  const root = document.getElementById("live");
  if (!root || root.dataset.done) return;
  const timer = setInterval(() => {
    const script = document.createElement("script");
    script.src = `live.js?${Date.now()}`;
    script.onload = script.onerror = () => script.remove();
    document.head.append(script);
  }, 2000);
  window.showLive = (html, done) => {
    root.innerHTML = html;
    if (done) clearInterval(timer);
  };
})();
