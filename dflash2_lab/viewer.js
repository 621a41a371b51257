// Shows one block of the views beside this script. Pickers choose the prompt, the anchor, the walk
// and the layer; a slot's button chooses whose attention shades the text. Texts of tokens are
// whatever a model says: they become text nodes and attributes, never markup.
(() => {
  const root = document.currentScript.closest(".dflash2-block");
  const { views, texts } = JSON.parse(root.querySelector("script[type='application/json']").text);
  const state = { view: views[0], policy: null, layer: "mean", slot: 1 };

  function el(tag, attributes = {}, ...children) {
    const node = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
      else if (value !== false) node.setAttribute(name, value === true ? "" : value);
    }
    node.append(...children);
    return node;
  }

  const sum = (values) => values.reduce((a, b) => a + b, 0);
  const text = (id) => (id === null ? "?" : texts[id]);
  const number = (x) => (x === null ? "–" : x.toFixed(1));
  const percent = (x) => (100 * x).toFixed(x >= 0.0995 ? 0 : 1);
  const shade = (x) => `background-color: rgba(var(--shade), ${(0.65 * Math.min(1, x)).toFixed(3)})`;
  const request = (view) => JSON.stringify([view.prompt_id, view.turn, view.sample]);

  function softmax(scores) {
    const top = Math.max(...scores.filter((x) => x !== null));
    const weights = scores.map((x) => (x === null ? 0 : Math.exp(x - top)));
    return weights.map((x) => x / sum(weights));
  }

  // Rows by slot, [older, nearest ..., block ...], of one layer or their mean; null where none is.
  function attention() {
    const wanted = (part) => ["mean", `${part.layer}`].includes(state.layer);
    const layers = state.view.attention.filter(wanted);
    if (!layers.length) return null;
    return layers[0].rows.map((row, slot) =>
      row.map((_, key) => sum(layers.map((part) => part.rows[slot][key])) / layers.length));
  }

  function picker(name, options, value, choose) {
    const entries = options.map(([key, label]) =>
      el("option", { value: key, selected: key === value }, label));
    const change = (event) => set(choose(event.target.value));
    return el("label", {}, name, el("select", { name, onchange: change }, ...entries));
  }

  function pickers() {
    const { view } = state;
    const requests = [...new Map(views.map((other) => [request(other), other])).entries()];
    const anchors = views.filter((other) => request(other) === request(view));
    const place = anchors.indexOf(view);
    const title = ({ prompt_id, turn, sample }) =>
      prompt_id + (turn || sample ? ` · turn ${turn}, sample ${sample}` : "");
    const step = (by, name, label) => {
      const onclick = () => set({ view: anchors[place + by] });
      const words = { title: `${name} anchor`, "aria-label": `${name} anchor` };
      return el("button", { name, disabled: !anchors[place + by], ...words, onclick }, label);
    };
    const layers = [["mean", "mean of layers"]];
    for (const { layer } of view.attention) layers.push([`${layer}`, `layer ${layer}`]);
    return el("div", { class: "bar" },
      picker("prompt", requests.map(([key, other]) => [key, title(other)]), request(view),
        (key) => ({ view: views.find((other) => request(other) === key) })),
      step(-1, "previous", "◀"),
      picker("anchor", anchors.map((other, n) => [`${n}`, `${other.anchor}`]), `${place}`,
        (n) => ({ view: anchors[n] })),
      step(1, "next", "▶"),
      picker("walk", view.policies.map((p) => [p, p]), state.policy, (policy) => ({ policy })),
      ...(layers.length > 1
        ? [picker("attention", layers, state.layer, (layer) => ({ layer }))] : []));
  }

  // Context, anchor and the target's tokens in reading order; `row` shades the context.
  function story(matched, row) {
    const { view, slot } = state;
    const near = view.context.length;
    const older = view.context_len - near;
    const token = (id, name, more = {}) => el("span", { class: `token ${name}`, ...more }, text(id));
    const top = row && Math.max(...row.slice(1, near + 1), 1e-9);
    const told = (share) => ({ style: shade(share / top), title: `${percent(share)} % of slot ${slot}` });
    return el("div", { class: "text" },
      el("span", { class: "soft" }, older > 0 ? `… ${older} older ` : ""),
      ...view.context.map((id, n) => token(id, "", row ? told(row[n + 1]) : {})),
      token(view.anchor_token, "anchor", { title: "the anchor" }),
      ...view.slots.map(({ target }, n) => token(target, n < matched ? "accepted" : "soft")));
  }

  function candidates(matched) {
    const { slots, temperature } = state.view;
    const words = temperature === 0
      ? ["✓ accepted", "✗ refused", "not reached"] : ["✓ equal", "✗ differs", "behind"];
    const paths = slots.map((slot) => slot.paths[state.policy]);
    const laws = slots.map((slot, s) => softmax(paths[s].scores ?? slot.unary));
    const behind = (s) => s > matched && "behind";
    const cell = (id, classes, note, more) =>
      el("td", { class: classes.filter(Boolean).join(" "), title: `${text(id)}  (id ${id})`, ...more },
        el("b", {}, text(id)), el("small", {}, note));
    const line = (name, make) =>
      el("tr", {}, el("th", { class: "side" }, name), ...slots.map((slot, s) => make(slot, s)));

    function choose({ slot }) {
      const pressed = `${slot === state.slot}`;
      const title = "shade the text by what this slot attends to";
      const onclick = () => set({ slot });
      const words = { title, "aria-label": `slot ${slot}: ${title}` };
      const name = `slot ${slot}`;
      return el("th", {}, el("button", { name, "aria-pressed": pressed, ...words, onclick }, `${slot}`));
    }

    function goal({ target, rank, p_target }, s) {
      const title = `${text(target)}  (id ${target})\np ${p_target}, q ${paths[s].q_target}`;
      return cell(target, ["target", behind(s)], `rank ${rank + 1}`, { title });
    }

    function candidate(n, slot, s) {
      const id = slot.ids[n];
      const unary = number(slot.unary[n]);
      const score = paths[s].scores && number(paths[s].scores[n]);
      const classes = [behind(s), id === paths[s].token && "walk", id === slot.target && "target",
        laws[s][n] > 0.3 && "strong"];
      const title = `${text(id)}  (id ${id})\nunary ${unary}${score ? `, score ${score}` : ""}`
        + `, softmax ${percent(laws[s][n])} %`;
      return cell(id, classes, score ? `${unary}→${score}` : unary, { title, style: shade(laws[s][n]) });
    }

    return el("div", { class: "scroll" },
      el("table", {
        "aria-label": "candidates of each slot",
        style: `min-width: ${40 + 66 * slots.length}px; max-width: ${40 + 150 * slots.length}px`,
      },
        line("slot", choose),
        line("target", goal),
        line("walk", (_, s) => cell(paths[s].token, ["walk", behind(s)],
          words[s < matched ? 0 : s === matched ? 1 : 2])),
        ...slots[0].ids.map((_, n) => line(`${n + 1}`, (slot, s) => candidate(n, slot, s)))));
  }

  function keys(rows) {
    const near = state.view.context.length;
    const groups = rows.map((row) => [row[0], sum(row.slice(1, near + 1)), ...row.slice(near + 1)]);
    const drafted = groups[0].slice(3).map((_, n) => `row ${n + 1}`);
    const names = ["older", `last ${near}`, "anchor", ...drafted];
    const line = (row, s) =>
      el("tr", { class: s + 1 === state.slot ? "chosen" : "" },
        el("th", { class: "side" }, `slot ${s + 1}`),
        ...row.map((share) => el("td", { style: shade(share) }, percent(share))));
    return el("div", { class: "scroll" },
      el("table", {
        "aria-label": "attention of each slot by key, per cent",
        style: `min-width: ${40 + 44 * names.length}px`,
      },
        el("tr", {}, el("th", { class: "side" }, "% on"), ...names.map((name) => el("th", {}, name))),
        ...groups.map(line)));
  }

  function verdict(matched) {
    const { slots, temperature } = state.view;
    const pairs = slots[0].paths[state.policy].scores !== null;
    const word = temperature === 0 ? "accepted" : "equal to the trace's tokens";
    const swatch = (style) => el("span", { class: "key", style });
    return el("div", { class: "verdict", role: "status" },
      el("strong", {}, `${matched} of ${slots.length} drafts ${word}. `),
      el("span", { class: "soft" },
        `Candidates by unary logit${pairs ? ", unary→score on the walk" : ""}. `),
      swatch("outline: 2px solid var(--walk); outline-offset: -2px"), " walk  ",
      swatch("box-shadow: inset 0 -3px 0 var(--target)"), " target  ",
      swatch(shade(0.8)), ` softmax of the ${pairs ? "scores" : "logits"}`);
  }

  function set(change) {
    const focused = live.contains(document.activeElement) && document.activeElement.name;
    Object.assign(state, change);
    const { view } = state;
    if (!view.policies.includes(state.policy)) state.policy = view.policies[0];
    if (!view.attention.some(({ layer }) => `${layer}` === state.layer)) state.layer = "mean";
    state.slot = Math.min(state.slot, view.slots.length);
    const matched = view.matched[state.policy];
    const rows = attention();
    const about = rows
      ? `What each slot attends to, % (mean over heads): older context, the last ${view.context.length} `
        + "tokens before the anchor, the anchor, and the block's own rows. "
        + `The text above is shaded for slot ${state.slot}.`
      : "No attention was kept at this anchor.";
    live.replaceChildren(
      pickers(),
      story(matched, rows && rows[state.slot - 1]),
      verdict(matched),
      candidates(matched),
      el("div", { class: "soft" }, about),
      ...(rows ? [keys(rows)] : []));
    // everything was built anew: the keyboard stays where it was, or goes from the last step to its picker
    const again = focused && live.querySelector(`[name="${focused}"]`);
    if (again) (again.disabled ? live.querySelector("[name=anchor]") : again).focus();
  }

  const live = el("div", { class: "live" });
  set({});
  root.querySelector(".still").replaceWith(live);
})();
