// The live page: asks the server it came from how far the training is, and what the network does with an image.
(() => {
  const $ = (id) => document.getElementById(id);
  const show = (element, yes) => { element.hidden = !yes; };
  const sleep = (ms) => new Promise((done) => setTimeout(done, ms));

  // Errors are sentences; a full queue is retried.
  async function ask(path, options = {}, tries = 20) {
    const answer = await fetch(path, options);
    if (answer.status === 503 && tries > 0) {
      await sleep(1000 * Number(answer.headers.get("retry-after") ?? 1));
      return ask(path, options, tries - 1);
    }
    const result = await answer.json();
    if (!answer.ok) throw new Error(typeof result.detail === "string" ? result.detail : "The server rejected the request.");
    return result;
  }

  // ---- training
  let seen = -1, state = "", evaluated = -1, searchable = false;
  async function follow() {
    try {
      const now = await ask("status");
      document.title = document.querySelector("h1").textContent = `${now.name} · ${now.state}`;
      $("summary").textContent = now.summary;
      $("summary").classList.remove("loading");
      $("progress").value = now.samples ? now.seen / now.samples : 0;
      show($("stop"), now.state === "running");
      show($("resume"), now.state === "stopped");
      show($("report"), now.state !== "running" && now.seen > 0);
      show($("command"), now.resume_command !== "");
      $("command").querySelector("code").textContent = now.resume_command;
      show($("problem"), now.problem !== "");
      $("problem").textContent = now.problem;
      if (now.seen !== seen) $("charts").innerHTML = now.charts;
      [seen, state, searchable] = [now.seen, now.state, now.searchable];
      show($("try"), state !== "running" && seen > 0);
      show($("waiting"), state === "running" || seen === 0);
      if (state === "finished" && evaluated !== seen) {
        evaluated = seen;
        verdict();
      } else if (state !== "finished") $("verdict").replaceChildren();
    } catch (problem) {
      $("summary").textContent = `The server does not answer (${problem.message}).`;
    }
    setTimeout(follow, state === "running" ? 1000 : 2500);
  }
  async function verdict() {
    $("verdict").innerHTML = '<p class="loading">Evaluating the network …</p>';
    try {
      $("verdict").innerHTML = (await ask("verdict")).html;
    } catch (problem) {
      $("verdict").textContent = problem.message;
    }
  }
  for (const name of ["stop", "resume"]) {
    $(name).addEventListener("click", async () => {
      $(name).disabled = true;
      try {
        await ask(name, { method: "POST" });
        $("summary").textContent = name === "stop" ? "Saving …" : "Starting …";
      } catch (problem) {
        $("problem").textContent = problem.message;
        show($("problem"), true);
      }
      await sleep(600);
      $(name).disabled = false;
    });
  }
  follow();

  // ---- an image
  let file = null, picture = null, grid = null, hidden = new Set(), cursor = 0, turn = 0, seed = 0;
  const form = (more = {}) => {
    const data = new FormData();
    data.append("image", file);
    for (const [name, value] of Object.entries(more)) data.append(name, value);
    return { method: "POST", body: data };
  };
  const load = (source) => new Promise((done) => {
    const image = new Image();
    image.onload = () => done(image);
    image.src = source;
  });

  function draw() {
    const canvas = $("mask"), pen = canvas.getContext("2d");
    [canvas.width, canvas.height] = [448, 448];
    pen.imageSmoothingEnabled = false;
    pen.drawImage(picture, 0, 0, canvas.width, canvas.height);
    if (!grid) return;
    const [width, height] = [canvas.width / grid.columns, canvas.height / grid.rows];
    pen.fillStyle = "#808080";
    for (const i of hidden) pen.fillRect((i % grid.columns) * width, Math.floor(i / grid.columns) * height, width, height);
    if (document.activeElement === canvas) {
      pen.lineWidth = 3;
      pen.strokeStyle = "#d55e00";
      pen.strokeRect((cursor % grid.columns) * width, Math.floor(cursor / grid.columns) * height, width, height);
    }
  }

  async function reconstruct(more) {
    const mine = ++turn;
    try {
      const found = await ask("reconstruct", form(more));
      if (mine !== turn) return;
      [grid, hidden] = [found, new Set(found.hidden)];
      picture = await load(found.image);
      $("reconstruction").src = found.reconstruction;
      $("error").textContent = `What the decoder makes of it (mean squared error ${found.error.toFixed(4)} where hidden).`;
      $("share").textContent = `${Math.round((100 * hidden.size) / (grid.rows * grid.columns))} %`;
      draw();
    } catch (problem) {
      if (mine !== turn) return;
      show($("masking"), false);
      $("error").textContent = problem.message;
    }
  }
  const painted = () => reconstruct({ hidden: [...hidden].join(",") || "none" });
  const drawn = () => reconstruct({ ratio: $("ratio").value, seed });

  async function look(chosen) {
    file = chosen;
    grid = null;
    seed = 0;
    show($("masking"), true);
    $("message").textContent = "Looking …";
    $("neighbors").replaceChildren();
    $("searched").textContent = "";
    try {
      const map = await ask("patches", form());
      picture = await load(map.image);
      $("original").src = map.image;
      $("patches").src = map.patches;
      show($("results"), true);
      draw();
      $("message").textContent = file.name ?? "";
      await drawn();
      $("searched").textContent = searchable ? "" : "The images are being embedded first …";
      while (!searchable) await sleep(500);
      if (file !== chosen) return;
      const found = await ask("search?k=12", form());
      $("searched").textContent = `Among ${found.searched.toLocaleString("en")} images.`;
      $("neighbors").replaceChildren(...found.neighbors.map((near) => {
        const item = document.createElement("li"), image = new Image(), name = document.createElement("b"), how = document.createElement("span");
        image.src = near.picture;
        image.alt = image.title = near.name;
        name.textContent = near.name.split("/").pop();
        how.textContent = near.similarity.toFixed(3);
        item.append(image, name, how);
        return item;
      }));
    } catch (problem) {
      $("message").textContent = problem.message;
    }
  }

  $("file").addEventListener("change", (event) => event.target.files[0] && look(event.target.files[0]));
  const drop = $("drop");
  for (const name of ["dragenter", "dragover"]) {
    drop.addEventListener(name, (event) => { event.preventDefault(); drop.classList.add("over"); });
  }
  for (const name of ["dragleave", "drop"]) drop.addEventListener(name, () => drop.classList.remove("over"));
  drop.addEventListener("drop", (event) => {
    event.preventDefault();
    if (event.dataTransfer.files[0]) look(event.dataTransfer.files[0]);
  });
  document.addEventListener("paste", (event) => {
    const pasted = [...(event.clipboardData?.files ?? [])].find((one) => one.type.startsWith("image/"));
    if (pasted && !$("try").hidden) look(pasted);
  });

  // ---- painting: the first patch touched decides whether the stroke hides or shows
  const canvas = $("mask");
  let hides = null, waiting = 0, last = null;
  // Position in units of patches.
  const position = (event) => {
    const box = canvas.getBoundingClientRect();
    return [((event.clientX - box.left) / box.width) * grid.columns, ((event.clientY - box.top) / box.height) * grid.rows];
  };
  const patch = ([x, y]) => {
    const [column, row] = [Math.floor(x), Math.floor(y)];
    const inside = column >= 0 && row >= 0 && column < grid.columns && row < grid.rows;
    return inside ? row * grid.columns + column : -1;
  };
  function paint(...patches) {
    if (!grid) return;
    for (const i of patches) {
      if (i < 0) continue;
      if (hides && hidden.size < grid.rows * grid.columns - 1) hidden.add(i);
      else if (!hides) hidden.delete(i);
    }
    draw();
    clearTimeout(waiting);
    waiting = setTimeout(painted, 200);
  }
  // Browsers coalesce moves: paint every patch on the line from the last position.
  function stroke(event) {
    const to = position(event), [dx, dy] = [to[0] - last[0], to[1] - last[1]];
    const steps = Math.ceil(4 * Math.max(Math.abs(dx), Math.abs(dy), 0.25));
    paint(...Array.from({ length: steps }, (_, i) => patch([last[0] + (dx * (i + 1)) / steps, last[1] + (dy * (i + 1)) / steps])));
    last = to;
  }
  canvas.addEventListener("pointerdown", (event) => {
    if (!grid) return;
    canvas.setPointerCapture(event.pointerId);
    last = position(event);
    hides = !hidden.has(patch(last));
    paint(patch(last));
  });
  canvas.addEventListener("pointermove", (event) => {
    if (!event.buttons || hides === null || !grid) return;
    const moves = event.getCoalescedEvents?.() ?? [];
    for (const move of moves.length ? moves : [event]) stroke(move);
  });
  canvas.addEventListener("pointerup", (event) => {
    if (hides !== null && grid) stroke(event);
    hides = null;
  });
  canvas.addEventListener("pointercancel", () => { hides = null; });
  canvas.addEventListener("focus", () => picture && draw());
  canvas.addEventListener("blur", () => picture && draw());
  canvas.addEventListener("keydown", (event) => {
    if (!grid) return;
    const [row, column] = [Math.floor(cursor / grid.columns), cursor % grid.columns];
    const to = { ArrowRight: [row, column + 1], ArrowLeft: [row, column - 1], ArrowUp: [row - 1, column], ArrowDown: [row + 1, column] };
    if (event.key in to) {
      const [r, c] = to[event.key];
      if (r >= 0 && c >= 0 && r < grid.rows && c < grid.columns) cursor = r * grid.columns + c;
      draw();
    } else if (event.key === " ") {
      hides = !hidden.has(cursor);
      paint(cursor);
      hides = null;
    } else return;
    event.preventDefault();
  });
  $("ratio").addEventListener("input", () => {
    $("share").textContent = `${Math.round(100 * $("ratio").value)} %`;
    clearTimeout(waiting);
    waiting = setTimeout(drawn, 150);
  });
  $("again").addEventListener("click", () => { seed += 1; drawn(); });
  $("clear").addEventListener("click", () => { hidden = new Set(); painted(); });

  // ---- samples of a denoiser
  $("make")?.addEventListener("click", async () => {
    $("making").textContent = "Making images …";
    try {
      const wanted = { num: Number($("number").value), steps: Number($("steps").value), seed: Number($("seed").value) };
      const headers = { "content-type": "application/json" };
      const made = await ask("sample", { method: "POST", headers, body: JSON.stringify(wanted) });
      $("samples").replaceChildren(...made.images.map((one) => {
        const item = document.createElement("li"), image = new Image();
        image.src = one.picture;
        image.alt = one.label === null ? "sample" : `sample of class ${one.label}`;
        item.append(image, one.label === null ? "" : `class ${one.label}`);
        return item;
      }));
      $("making").textContent = `${made.images.length} images, ${made.evaluations} evaluations of the network each.`;
    } catch (problem) {
      $("making").textContent = problem.message;
    }
  });
})();
