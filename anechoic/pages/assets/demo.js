// The demo's picker: a thing drawn by one hand is searched among the drawings of another, by every encoder and block.
(() => {
  const root = document.getElementById("picker");
  if (!root) return;
  const data = JSON.parse(root.querySelector("script").textContent);
  const bytes = (text) => Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const numbers = (text) => new Uint16Array(bytes(text).buffer);
  const nearest = numbers(data.nearest), place = numbers(data.place);
  const hands = data.hands.length, count = data.things.length;
  const start = (search, from, to) => ((search * hands + from) * hands + to) * count;
  const make = (tag, options = {}, ...children) => {
    const element = Object.assign(document.createElement(tag), options);
    element.append(...children);
    return element;
  };

  // Each hand's sheet is one picture; a tile shows a part of it.
  const style = make("style");
  style.textContent = data.sheets.map((sheet, hand) => {
    const url = URL.createObjectURL(new Blob([bytes(sheet.split(",")[1])], { type: "image/webp" }));
    return `#picker .hand-${hand} { background-image: url(${url}); background-size: ${data.columns * 100}% ${data.rows * 100}%; }`;
  }).join("\n");
  document.head.append(style);
  const at = (tile, hand, thing) => {
    const number = data.tiles[thing];
    const part = (index, parts) => (parts > 1 ? (100 * index) / (parts - 1) : 0);
    tile.classList.add("tile", `hand-${hand}`);
    tile.style.backgroundPosition =
      `${part(number % data.columns, data.columns)}% ${part(Math.floor(number / data.columns), data.rows)}%`;
    return tile;
  };
  const tile = (hand, thing) => {
    const picture = at(make("div"), hand, thing);
    picture.setAttribute("role", "img");
    picture.setAttribute("aria-label", `${data.things[thing]}, drawn by ${data.hands[hand]}`);
    picture.title = data.things[thing];
    return picture;
  };

  // ---- what is asked
  const choice = (label, chosen) => {
    const select = make("select");
    data.hands.forEach((name, i) => select.append(make("option", { value: i, textContent: name, selected: i === chosen })));
    return [select, make("label", {}, `${label} `, select)];
  };
  const [from, fromLabel] = choice("Drawn by", 0);
  const [to, toLabel] = choice("find it among the drawings of", Math.min(2, hands - 1));
  const search = make("input", { type: "search", placeholder: "bee, cup, moon …" });
  const kind = make("select", {}, make("option", { value: "", textContent: "all kinds" }));
  data.kinds.forEach((name, i) => data.kind.includes(i) && kind.append(make("option", { value: i, textContent: name })));
  const another = make("button", { type: "button", className: "plain", textContent: "Another thing" });
  const things = make("div", { className: "things" });
  things.setAttribute("role", "group");
  things.setAttribute("aria-label", "Things to choose from");
  const answer = make("div");
  answer.setAttribute("aria-live", "polite");
  root.append(
    make("div", { className: "controls" }, fromLabel, toLabel),
    make("div", { className: "controls" }, make("label", {}, "Thing ", search), make("label", {}, "Kind ", kind), another),
    things, answer);

  // The page opens with a thing that both networks find after their last block and neither after its first, if any.
  const layersOf = (encoder) => data.searches.map((one, i) => [one, i]).filter(([one]) => one.encoder === encoder).map(([, i]) => i);
  const placed = (number, i) => place[start(number, Number(from.value), Number(to.value)) + i];
  const pair = ["residual", "decayed"].map(layersOf);
  const opens = data.things.findIndex((_, i) =>
    pair.every((layers) => placed(layers.at(-1), i) === 1 && placed(layers[1], i) > 1));
  let thing = Math.max(0, opens);
  const buttons = data.things.map((name, i) => {
    const button = make("button", { type: "button", title: name });
    button.setAttribute("aria-label", name);
    button.addEventListener("click", () => { thing = i; show(); });
    return button;
  });
  things.append(...buttons);
  const listed = () => data.things.map((_, i) => i).filter((i) =>
    data.things[i].toLowerCase().includes(search.value.trim().toLowerCase())
    && (kind.value === "" || data.kind[i] === Number(kind.value)));
  const filter = () => {
    const kept = new Set(listed());
    buttons.forEach((button, i) => { button.hidden = !kept.has(i); });
  };
  const redraw = () => {
    buttons.forEach((button, i) => { button.className = ""; at(button, Number(from.value), i); });
    show();
  };

  // ---- what is found
  const encoders = [...new Set(data.searches.map((one) => one.encoder))];
  const words = {
    "raw pixels": "the drawing itself",
    untrained: "a network that has seen nothing",
    residual: "plain shortcuts",
    decayed: "shortcuts that decay with depth",
  };
  const depth = Math.max(...data.searches.map((one) => one.layer));
  const cell = (number) => {
    const begin = start(number, Number(from.value), Number(to.value));
    const found = nearest[begin + thing], rank = place[begin + thing];
    const all = place.subarray(begin, begin + count);
    const share = (100 * all.reduce((sum, one) => sum + (one === 1), 0)) / count;
    const bar = make("i");
    bar.style.width = `${Math.min(100, share * 2)}%`;
    const said = rank === 1 ? "✓ found" : `place ${rank.toLocaleString("en")}`;
    return make("td", { className: rank === 1 ? "found" : "", title: `nearest: ${data.things[found]}` },
      tile(Number(to.value), found), make("div", { className: "said", textContent: said }),
      make("div", { className: "share", textContent: `all: ${share.toFixed(1)} %` }),
      make("div", { className: "bar" }, bar));
  };
  const row = (encoder) => {
    const own = data.searches.map((one, i) => [one, i]).filter(([one]) => one.encoder === encoder);
    const head = make("th", { scope: "row" }, encoder, make("span", { textContent: words[encoder] ?? "" }));
    const line = make("tr", {}, head);
    // What has no blocks of its own stands under the last one, where it is compared.
    const blocks = own.length > 2 ? own : own.slice(-1);
    const layers = new Map(blocks.map(([one, i]) => [blocks.length > 1 ? one.layer : depth, i]));
    for (let layer = 0; layer <= depth; layer++) line.append(layers.has(layer) ? cell(layers.get(layer)) : make("td"));
    return line;
  };
  const show = () => {
    buttons.forEach((button, i) => button.setAttribute("aria-pressed", i === thing));
    const [one, other] = [Number(from.value), Number(to.value)];
    if (one === other) {
      answer.replaceChildren(make("p", { textContent: "Choose two different hands." }));
      return;
    }
    const asked = (hand, text) => make("figure", {}, tile(hand, thing), make("figcaption", {},
      make("b", { textContent: data.things[thing] }), `${text} ${data.hands[hand]}`));
    const head = make("tr", {}, make("th"));
    for (let layer = 0; layer <= depth; layer++) head.append(make("th", { scope: "col", textContent: layer ? `block ${layer}` : "embedding" }));
    const told = `The drawing by ${data.hands[other]} that is nearest to it, and the place of the right one among ` +
      `${count.toLocaleString("en")}. all: how many of all things are found in this way; bars end at 50 %.`;
    const table = make("table", {}, make("thead", {}, head), make("tbody", {}, ...encoders.map(row)));
    const scroll = make("div", { className: "scroll", tabIndex: 0 }, table);
    scroll.setAttribute("role", "region");
    scroll.setAttribute("aria-label", "What each encoder finds");
    answer.replaceChildren(make("div", { className: "asked" }, asked(one, "asked: drawn by"), asked(other, "to be found: drawn by")),
      make("p", { className: "told", textContent: told }), scroll);
  };

  from.addEventListener("change", redraw);
  to.addEventListener("change", show);
  search.addEventListener("input", filter);
  kind.addEventListener("change", filter);
  another.addEventListener("click", () => {
    const kept = listed();
    if (kept.length) thing = kept[Math.floor(Math.random() * kept.length)];
    show();
    things.scrollTop = buttons[thing].offsetTop - things.offsetTop - 60;
  });
  redraw();
  things.scrollTop = buttons[thing].offsetTop - things.offsetTop - 60;
})();
