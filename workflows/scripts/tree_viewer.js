// Steps through recorded draft trees. Left and right: step; up and down: node; Home and End: first and last step.
(() => {
  const root = document.getElementById("tree-viewer");
  const runs = JSON.parse(document.getElementById("tree-data").textContent);
  if (!root || !runs.length) return;
  const svgns = "http://www.w3.org/2000/svg";
  const make = (name, fields, text) => {
    const element = document.createElementNS(svgns, name);
    for (const [key, value] of Object.entries(fields)) element.setAttribute(key, value);
    if (text !== undefined) element.textContent = text;
    return element;
  };
  const find = (name) => root.querySelector(`[data-part="${name}"]`);
  const [select, range, back, next, picture, said] = ["run", "step", "back", "next", "picture", "said"].map(find);
  const shown = (text) => text.replace(/\n/g, "⏎").replace(/\t/g, "⇥").replace(/^ | $/g, "␣") || "∅";
  const state = { run: 0, step: 0, node: 0 };
  runs.forEach((run, i) => {
    const option = document.createElement("option");
    option.value = i;
    option.textContent = `${run.variant}, ${run.dataset}, ${run.setting}, ${run.id}`;
    select.append(option);
  });

  // leaves get a line each, a parent stands at its first child's, so that the tree reads from the top like text
  const lines = (nodes) => {
    const children = nodes.map(() => []);
    nodes.forEach(([parent], i) => { if (parent >= 0) children[parent].push(i); });
    const at = [], depth = [], order = [];
    let line = 0;
    const visit = (i, d) => {
      order.push(i);
      depth[i] = d;
      at[i] = line;
      children[i].sort((a, b) => nodes[b][3] - nodes[a][3] || nodes[b][2] - nodes[a][2]);
      children[i].forEach((child, n) => { if (n) line += 1; visit(child, d + 1); });
    };
    visit(0, 0);
    return { at, depth, order, height: line + 1 };
  };

  const draw = () => {
    const { steps } = runs[state.run], step = steps[state.step], { nodes } = step;
    const { at, depth, order, height } = lines(nodes);
    state.order = order;
    const column = 108, row = 22, width = (Math.max(...depth) + 1) * column + 12;
    const svg = make("svg", { viewBox: `0 0 ${width} ${height * row + 8}`, width, height: height * row + 8, role: "img",
      "aria-label": `draft tree of step ${state.step + 1}: ${nodes.length - 1} drafts, ${step.accepted} accepted` });
    const place = (i) => [depth[i] * column + 10, at[i] * row + 14];
    nodes.forEach(([parent, , , accepted], i) => {
      if (parent < 0) return;
      const [x, y] = place(i), [px, py] = place(parent);
      svg.append(make("path", { d: `M${px} ${py}V${y}H${x - 6}`, class: accepted ? "edge on" : "edge" }));
    });
    nodes.forEach(([, text, probability, accepted], i) => {
      const [x, y] = place(i);
      const group = make("g", { class: `node${accepted ? " on" : ""}${i === state.node ? " picked" : ""}` });
      const size = 3 + 4 * Math.sqrt(probability);
      // accepted nodes are diamonds, so that colour is not alone in saying it
      group.append(accepted
        ? make("path", { d: `M${x} ${y - size - 1}L${x + size + 1} ${y}L${x} ${y + size + 1}L${x - size - 1} ${y}Z` })
        : make("circle", { cx: x, cy: y, r: size }));
      const word = shown(text);
      group.append(make("text", { x: x + 12, y: y + 4 }, word.length > 11 ? `${word.slice(0, 10)}…` : word));
      group.append(make("title", {}, `${word}: ${probability} given its parent, ${accepted ? "accepted" : "not accepted"}`));
      group.addEventListener("click", () => { state.node = i; draw(); picture.focus(); });
      svg.append(group);
    });
    picture.replaceChildren(svg);
    const picked = svg.querySelector(".picked");
    if (picked && document.activeElement === picture) picked.scrollIntoView({ block: "nearest", inline: "nearest" });
    select.value = state.run;
    range.max = steps.length - 1;
    range.value = state.step;
    range.setAttribute("aria-valuetext", `step ${state.step + 1} of ${steps.length}`);
    back.disabled = state.step === 0;
    next.disabled = state.step === steps.length - 1;
    const path = [];
    for (let i = state.node; i > 0; i = nodes[i][0]) path.unshift(nodes[i][1]);
    const [, text, probability, accepted] = nodes[state.node];
    const where = state.node ? `${path.map(shown).join(" ")}: ${probability} given its parent, ${accepted ? "accepted" : "not accepted"}`
      : `root ${shown(text)}`;
    said.textContent = `Step ${state.step + 1} of ${steps.length}: ${nodes.length - 1} drafts, ${step.accepted} accepted. ${where}.`;
  };
  const go = (step) => {
    state.step = Math.min(Math.max(step, 0), runs[state.run].steps.length - 1);
    state.node = 0;
    draw();
  };
  const walk = (by) => {
    const place = state.order.indexOf(state.node) + by;
    state.node = state.order[Math.min(Math.max(place, 0), state.order.length - 1)];
    draw();
  };
  select.addEventListener("change", () => { state.run = Number(select.value); go(0); });
  range.addEventListener("input", () => go(Number(range.value)));
  back.addEventListener("click", () => go(state.step - 1));
  next.addEventListener("click", () => go(state.step + 1));
  picture.addEventListener("keydown", (event) => {
    const keys = { ArrowLeft: () => go(state.step - 1), ArrowRight: () => go(state.step + 1), ArrowUp: () => walk(-1),
      ArrowDown: () => walk(1), Home: () => go(0), End: () => go(runs[state.run].steps.length - 1) };
    if (keys[event.key] && !event.altKey && !event.ctrlKey && !event.metaKey) {
      event.preventDefault();
      keys[event.key]();
    }
  });
  root.hidden = false;
  draw();
})();
