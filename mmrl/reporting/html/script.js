// Reading numbers off charts, and looking for samples. The page is whole without it.
(() => {
  const short = (v) => {
    if (v === null) return "–"; // a gap
    const size = Math.abs(v);
    if (size < 1e-12) return "0";
    if (size < 1e-3 || size >= 1e5) return v.toExponential(1).replace("e+", "e");
    return v.toFixed(Math.max(0, 2 - Math.floor(Math.log10(size))));
  };

  for (const chart of document.querySelectorAll("svg[data-points]")) {
    const { box: [left, right, from, to], lines } = JSON.parse(chart.dataset.points);
    const values = [...chart.parentElement.querySelectorAll(".legend output")];
    const last = values.map((value) => value.textContent);
    const cursor = chart.querySelector(".cursor");
    const unit = chart.parentElement.querySelector(".unit");
    const words = unit && unit.textContent;
    const steps = [...new Set(lines.flatMap(([x]) => x))];
    const nearest = (xs, x) => xs.reduce((best, v, i) => (Math.abs(v - x) < Math.abs(xs[best] - x) ? i : best), 0);
    chart.addEventListener("pointermove", (event) => {
      const { left: start, width } = chart.getBoundingClientRect();
      const at = (event.clientX - start) / width * chart.viewBox.baseVal.width;
      const step = steps[nearest(steps, from + (at - left) / (right - left) * (to - from))];
      const x = left + (step - from) / (to - from) * (right - left);
      cursor.setAttribute("x1", x);
      cursor.setAttribute("x2", x);
      cursor.style.visibility = "visible";
      if (unit) unit.textContent = `${words} · step ${step}`;
      lines.forEach(([xs, ys], i) => { values[i].textContent = short(ys[nearest(xs, step)]); });
    });
    chart.addEventListener("pointerleave", () => {
      cursor.style.visibility = "hidden";
      if (unit) unit.textContent = words;
      values.forEach((value, i) => { value.textContent = last[i]; });
    });
  }

  for (const other of document.querySelectorAll("audio[data-same]")) {
    other.src = document.getElementById(other.dataset.same).src;
  }

  const sieve = document.querySelector(".sieve");
  if (!sieve) return;
  const list = document.querySelector(".samples");
  const count = sieve.querySelector("output");
  const more = document.querySelector(".more");
  const few = 24;
  let limit = few;
  const sift = () => {
    const { step, by, order, least, most, words } = Object.fromEntries(new FormData(sieve));
    const sought = words.trim().toLowerCase();
    const value = (sample) => Number.parseFloat(sample.dataset[by]);
    const samples = [...list.children];
    const found = samples.filter((sample) => {
      const reward = value(sample);
      const inside = (least === "" || reward >= least) && (most === "" || reward <= most);
      const hit = (!step || sample.dataset.step === step) && inside
        && (!sought || sample.textContent.toLowerCase().includes(sought));
      sample.hidden = true;
      return hit;
    });
    const turn = order === "up" ? 1 : -1;
    found.sort((a, b) => {
      const [one, other] = [value(a), value(b)];
      if (Number.isNaN(one) || Number.isNaN(other)) return Number.isNaN(one) - Number.isNaN(other);
      return turn * (one - other);
    });
    list.append(...found);
    found.slice(0, limit).forEach((sample) => { sample.hidden = false; });
    count.textContent = `${found.length} of ${samples.length}`;
    more.hidden = found.length <= limit;
  };
  sieve.hidden = false;
  sieve.addEventListener("input", () => { limit = few; sift(); });
  more.addEventListener("click", () => { limit += few; sift(); });
  sieve.addEventListener("submit", (event) => event.preventDefault());
  sift();
})();
