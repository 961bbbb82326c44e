"use strict";
(() => {
  const short = (value) => String(+value.toPrecision(3));
  const scaled = (value, scales) => {
    const [size, unit] = scales.find(([size]) => Math.abs(value) >= size) || scales[scales.length - 1];
    return `${short(value / size)} ${unit}`;
  };
  const formats = {
    bytes: (value) => scaled(value, [[2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"], [1, "B"]]),
    seconds: (value) => scaled(value, [[1, "s"], [1e-3, "ms"], [1e-6, "µs"]]),
    rate: (value) => `${short(value)} samples/s`,
    number: (value) => String(+value.toPrecision(4)),
    count: (value) => String(Math.round(value)),
  };
  const ofAxis = { ...formats, rate: short };
  const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name);
  const powers = Array.from({ length: 60 }, (_, power) => 2 ** power);
  const steps = { bytes: powers, count: [1, 2, 5].flatMap((n) => Array.from({ length: 12 }, (_, i) => n * 10 ** i)).sort((a, b) => a - b) };

  // Sums from the bottom, the whole first: each lower part is then painted over those above it.
  const stacked = (series) => {
    const sums = [];
    for (const { values } of series) {
      const below = sums[0] || values.map(() => 0);
      sums.unshift(values.map((value, point) => value + below[point]));
    }
    return sums;
  };

  const columns = ({ x, series, stacked: isStacked }) => [x, ...(isStacked ? stacked(series) : series.map((each) => each.values))];

  function axis(unit, options) {
    return {
      stroke: () => style("--text"), grid: { stroke: () => style("--line"), width: 1 }, ticks: { stroke: () => style("--line"), width: 1, size: 5 },
      incrs: steps[unit] || undefined, values: (_, ticks) => ticks.map((tick) => tick === null ? "" : ofAxis[unit](tick)), ...options,
    };
  }

  const drawn = new Map();  // of each figure: its plot, and what shows another chart in it

  function draw(figure, chart) {
    const plot = figure.querySelector(".plot"), readout = figure.querySelector(".readout");
    const count = chart.series.length, resting = () => chart.mark ?? chart.x.length - 1;
    const lines = chart.series.map((_, number) => {
      const place = chart.stacked ? count - 1 - number : number, colour = () => style(`--c${chart.series[place].colour % 7}`);
      const line = { stroke: colour, width: chart.stacked ? 0.5 : 2, points: { show: () => chart.x.length < 30 && !chart.stacked } };
      return chart.stacked ? { ...line, fill: colour, paths: uPlot.paths.stepped({ align: 1 }) } : line;
    });
    const read = (point) => {
      const values = chart.series.map(({ label, values }) =>
        `${label} ${values[point] === null ? "-" : formats[chart.unit](values[point])}`);
      const whole = chart.stacked ? [`${formats[chart.unit](chart.series.reduce((sum, each) => sum + each.values[point], 0))} in all`] : [];
      const first = `${chart.xLabel} ${formats[chart.xUnit](chart.x[point])}: ${[...whole, ...values].join(", ")}`;
      const text = [first, chart.details[point]].filter(Boolean).join("\n");
      if (readout.textContent !== text) readout.textContent = text;
    };
    const paint = (u) => {
      const { ctx, bbox } = u, ratio = devicePixelRatio;
      ctx.save();
      ctx.font = `${11 * ratio}px system-ui, sans-serif`;
      ctx.fillStyle = ctx.strokeStyle = style("--text");
      ctx.lineWidth = ratio;
      const stroke = (...points) => { ctx.beginPath(); points.forEach(([x, y], at) => ctx[at ? "lineTo" : "moveTo"](x, y)); ctx.stroke(); };
      ctx.strokeStyle = style("--faint");
      chart.bands.forEach(([point, ...names], number) => {
        const start = u.valToPos(chart.x[point], "x", true), after = chart.bands[number + 1];
        const end = after ? u.valToPos(chart.x[after[0]], "x", true) : bbox.left + bbox.width;
        ctx.textAlign = "left";
        if (start >= bbox.left && end <= bbox.left + bbox.width + 1) {
          const name = names.find((each) => ctx.measureText(each).width + 6 * ratio < end - start) ?? "";
          ctx.fillText(name, start + 3 * ratio, bbox.top - 4 * ratio);
          stroke([start, bbox.top - 4 * ratio], [start, bbox.top + bbox.height]);
        }
      });
      if (chart.limit !== null) {
        const y = u.valToPos(chart.limit, "y", true);
        if (y >= bbox.top) {
          ctx.fillStyle = ctx.strokeStyle = style("--over");
          stroke([bbox.left, y], [bbox.left + bbox.width, y]);
          const label = [chart.limitLabel, bbox.left + bbox.width - 3 * ratio, y + 12 * ratio];
          [ctx.textAlign, ctx.strokeStyle, ctx.lineWidth] = ["right", style("--back"), 3 * ratio];
          ctx.strokeText(...label);
          ctx.fillText(...label);
          ctx.lineWidth = ratio;
        }
      }
      if (chart.mark !== null) {
        const x = u.valToPos(chart.x[chart.mark], "x", true), y = u.valToPos(u.data[1][chart.mark], "y", true);
        if (x >= bbox.left && x <= bbox.left + bbox.width) {
          ctx.fillStyle = ctx.strokeStyle = style("--over");
          ctx.setLineDash([4 * ratio, 3 * ratio]);
          stroke([x, bbox.top], [x, bbox.top + bbox.height]);
          ctx.beginPath(); ctx.arc(x, y, 4 * ratio, 0, 7); ctx.fill();
        }
      }
      ctx.restore();
    };
    const highest = (_, low, high) => [Math.min(low, 0), 1.05 * (chart.limit !== null && chart.limit < 2 * high ? Math.max(high, chart.limit) : high)];
    const u = new uPlot({
      width: plot.clientWidth, height: 260, series: [{}, ...lines],
      scales: { x: { time: false, ...(chart.xLog ? { distr: 3, log: 2 } : {}) }, y: chart.unit === "number" ? {} : { range: highest } },
      axes: [axis(chart.xUnit, { label: chart.xLabel, labelSize: 20, size: 28, ...(chart.xLog ? { incrs: undefined } : {}) }), axis(chart.unit, { size: 72, ...(chart.unit === "rate" ? { label: "samples/s", labelSize: 20, size: 50 } : {}) })],
      legend: { show: false }, cursor: { y: false, drag: { x: true, y: false } }, padding: [18, 24, 0, 0],
      hooks: { draw: [paint], setCursor: [(u) => read(u.cursor.idx ?? resting())] },
    }, columns(chart), plot);
    read(resting());
    const change = (next) => {
      const isZoomed = u.scales.x.min > chart.x[0] || u.scales.x.max < chart.x.at(-1), place = chart.x[u.cursor.idx];
      chart = next;
      readout.ariaLive = document.activeElement === plot ? "polite" : "off";  // news is not read aloud
      u.setData(columns(chart), !isZoomed);
      if (isZoomed) u.redraw();
      if (place === undefined) read(resting());
      else u.setCursor({ left: u.valToPos(place, "x"), top: 0 });
    };
    drawn.set(figure, { u, count, change });
    plot.addEventListener("keydown", (event) => {
      const at = u.cursor.idx ?? resting(), last = chart.x.length - 1;
      const to = { ArrowLeft: at - 1, ArrowRight: at + 1, PageUp: at - 10, PageDown: at + 10, Home: 0, End: last }[event.key];
      if (to === undefined) return;
      event.preventDefault();
      readout.ariaLive = "polite";
      u.setCursor({ left: u.valToPos(chart.x[Math.min(Math.max(to, 0), last)], "x"), top: 0 });
    });
    new ResizeObserver(() => { if (plot.clientWidth !== u.width) u.setSize({ width: plot.clientWidth, height: 260 }); }).observe(plot);
  }
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { for (const { u } of drawn.values()) u.redraw(false); });

  function drawAll(page) {
    const charts = JSON.parse(page.getElementById("charts").textContent);
    for (const figure of document.querySelectorAll("figure[data-chart]")) {
      const chart = charts[figure.dataset.chart], before = drawn.get(figure);
      if (before?.count === chart.series.length) { before.change(chart); continue; }
      const plot = figure.querySelector(".plot");
      if (before) plot.replaceWith(plot.cloneNode(false));
      draw(figure, chart);
    }
    for (const figure of drawn.keys()) if (!figure.isConnected) drawn.delete(figure);
  }

  // Make an element like that of another page. What the reader opened, focused or scrolled stays as it is.
  const headings = ":scope > h2, :scope > figcaption > h3, :scope > :is(.leaf, details > summary) > .name";
  const key = (node) => node.nodeName + (node.className ?? "") + (node.querySelector?.(headings)?.textContent ?? "");
  function make(element, like) {
    for (const { name, value } of like.attributes) if (name !== "open" && element.getAttribute(name) !== value) element.setAttribute(name, value);
    if (element.matches(".plot, .readout")) return;
    const waiting = Map.groupBy(element.childNodes, key);
    const children = [...like.childNodes].map((child) => [waiting.get(key(child))?.shift(), child]);
    for (const node of [...waiting.values()].flat()) node.remove();
    children.forEach(([node, child], at) => {
      const kept = node ?? document.importNode(child, true);
      if (element.childNodes[at] !== kept) element.insertBefore(kept, element.childNodes[at] ?? null);
      if (node?.nodeType === Node.ELEMENT_NODE) make(node, child);
      else if (node && node.data !== child.data) node.data = child.data;
    });
  }

  function follow(live) {
    const [status, since, button] = live.children;
    let tag = "", isFollowing = true, isAsking = false;
    const set = (follows, state, label) => {
      isFollowing = follows;
      if (status.textContent !== state) [status.textContent, button.textContent] = [state, label];
    };
    button.addEventListener("click", () => isFollowing ? set(false, "Paused", "Continue") : (set(true, "Live", "Pause"), ask()));
    async function ask() {
      if (!isFollowing || document.hidden || isAsking) return;  // an answer that is slow is not overtaken
      isAsking = true;
      try {
        const answer = await fetch(location.href, { cache: "no-store", signal: AbortSignal.timeout(30_000), headers: tag ? { "If-None-Match": tag } : {} });
        if (answer.status === 200) {
          const page = new DOMParser().parseFromString(await answer.text(), "text/html");
          if (!isFollowing) return;
          tag = answer.headers.get("ETag");
          document.title = page.title;
          make(document.querySelector("main"), page.querySelector("main"));
          drawAll(page);
          since.textContent = `· ${new Date().toLocaleTimeString()}`;
        } else if (answer.status !== 304) throw new Error(answer.status);
      } catch {
        if (isFollowing) set(false, "Ended, or out of reach", "Try again");
      } finally {
        isAsking = false;
      }
    }
    setInterval(ask, 2000);
  }

  drawAll(document);
  const live = document.querySelector(".live");
  if (live) follow(live);
})();
