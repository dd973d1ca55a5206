// Looking through the answers of one evaluation, or of two: filters, order, some rows at a time.
(() => {
  const { rows, measures, names, images, sounds } = JSON.parse(document.querySelector("script.data").textContent);
  const sieve = document.querySelector(".sieve");
  const list = document.querySelector(".samples");
  const count = sieve.querySelector("output");
  const [back, on] = document.querySelectorAll(".pager button");
  const place = document.querySelector(".pager output");
  const few = 24;
  const equal = 1e-8;
  let at = 0;

  const short = (v, sign) => {
    if (v === null) return "–";
    const size = Math.abs(v);
    const digits = size < equal || Number.isInteger(v) ? 0 : Math.max(0, 2 - Math.floor(Math.log10(size)));
    let text = v.toFixed(digits);
    if (size >= equal && (size < 1e-3 || size >= 1e5)) text = v.toExponential(1).replace("e+", "e");
    return sign && v > equal ? `+${text}` : text;
  };
  const mean = (answers, by) => {
    const known = answers.map(({ values }) => values[by]).filter((v) => v !== null);
    return known.length ? known.reduce((a, b) => a + b) / known.length : null;
  };
  // The mean of the answers to a prompt; of two evaluations its change.
  const value = ({ sides }, by) => {
    const means = sides.map((answers) => mean(answers, by));
    if (means.includes(null)) return null;
    return means.length === 2 ? means[1] - means[0] : means[0];
  };
  const group = (row, by) => {
    const v = value(row, by);
    if (names.length === 2) {
      if (v === null) return "";
      return Math.abs(v) <= equal ? "unchanged" : v > 0 ? "better" : "worse";
    }
    const { correct } = row.sides[0][0];
    return correct === true ? "correct" : correct === false ? "wrong" : "";
  };
  const words = (row) => {
    const texts = row.sides.flat().map(({ text }) => text);
    row.words ??= [row.uid, row.prompt, row.target, ...(row.media ?? []), ...texts].join("\n").toLowerCase();
    return row.words;
  };

  // Everything from files gets into the page as text, never as HTML.
  const add = (parent, tag, text, kind) => {
    const made = document.createElement(tag);
    if (text !== undefined) made.textContent = text;
    if (kind) made.className = kind;
    parent.append(made);
    return made;
  };
  const image = (parent, index, alt) => {
    if (index === null) return;
    const shown = add(parent, "img");
    shown.src = `data:image/jpeg;base64,${images[index]}`;
    shown.alt = alt;
  };
  const answered = (parent, { text, made, values, turns }, several) => {
    if (turns.length) {
      const talk = add(parent, "details", undefined, "talk");
      talk.open = turns.some((part) => typeof part === "number");
      add(talk, "summary", "conversation");
      for (const part of turns) typeof part === "string" ? add(talk, "p", part) : image(talk, part, "image");
    }
    if (text !== null) add(parent, "p", text === "" ? "(no text)" : text);
    image(parent, made, "image of the answer");
    const told = values.map((v, i) => `${measures[i]} ${short(v)}`);
    if (several) add(parent, "small", told.join(" · "));
  };
  const card = (row, by, colour) => {
    const article = add(list, "article", undefined, "sample");
    article.style.setProperty("--mark", colour(row));
    const header = add(article, "header");
    add(header, "b", short(value(row, by), names.length === 2));
    for (const text of [group(row, by), row.uid, row.split]) if (text) add(header, "span", text);
    add(article, "p", row.prompt, "asked");
    image(article, row.seen, "image of the prompt");
    if (row.heard !== null) {
      const heard = add(article, "audio");
      heard.controls = true;
      heard.preload = "none";
      heard.src = `data:audio/wav;base64,${sounds[row.heard]}`;
    }
    if (row.seen === null && row.media && row.media.length) add(article, "small", row.media.join(", "));
    if (row.target !== null) add(add(article, "p", "", "target"), "span", row.target);
    const beside = names.length === 2 ? add(article, "div", undefined, "pair") : article;
    row.sides.forEach((answers, side) => {
      const column = names.length === 2 ? add(beside, "div") : article;
      if (names.length === 2) add(column, "b", names[side]);
      for (const answer of answers) answered(column, answer, measures.length > 1 || names.length === 2);
    });
  };

  const sift = () => {
    const { show, split, by, order, least, most, words: sought } = Object.fromEntries(new FormData(sieve));
    const text = sought.trim().toLowerCase();
    const found = rows.filter((row) => {
      const v = value(row, by);
      return (!show || group(row, by) === show) && (!split || row.split === split)
        && (least === "" || (v !== null && v >= least)) && (most === "" || (v !== null && v <= most))
        && (!text || words(row).includes(text));
    });
    if (order) {
      const turn = order === "up" ? 1 : -1;
      const keyed = found.map((row) => [row, value(row, by)]);
      keyed.sort(([, a], [, b]) => (a === null || b === null ? (a === null) - (b === null) : turn * (a - b)));
      keyed.forEach(([row], i) => { found[i] = row; });
    }
    const known = rows.map((row) => value(row, by)).filter((v) => v !== null);
    const low = known.reduce((a, b) => Math.min(a, b), Infinity);
    const high = known.reduce((a, b) => Math.max(a, b), -Infinity);
    const colour = (row) => {
      const v = value(row, by);
      if (v === null || (names.length === 2 && Math.abs(v) <= equal)) return "#8a97a5";
      const { correct } = row.sides[0][0];
      if (names.length === 1 && high <= low && correct == null) return "#8a97a5"; // nothing to compare
      const share = names.length === 2 ? Number(v > 0) : high > low ? (v - low) / (high - low) : Number(correct);
      const mixed = [[200, 31], [90, 111], [20, 180]].map(([a, b]) => Math.round(a + share * (b - a)));
      return `rgb(${mixed})`;
    };
    at = Math.max(0, Math.min(at, found.length - 1));
    at -= at % few;
    list.replaceChildren();
    for (const row of found.slice(at, at + few)) card(row, by, colour);
    count.textContent = `${found.length} of ${rows.length}`;
    place.textContent = found.length ? `${at + 1} to ${Math.min(at + few, found.length)}` : "";
    back.disabled = at === 0;
    on.disabled = at + few >= found.length;
  };
  const turn = (by) => {
    at += by;
    sift();
    sieve.scrollIntoView();
  };
  sieve.addEventListener("input", () => { at = 0; sift(); });
  sieve.addEventListener("submit", (event) => event.preventDefault());
  back.addEventListener("click", () => turn(-few));
  on.addEventListener("click", () => turn(few));
  sift();
})();
