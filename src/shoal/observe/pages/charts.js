/* Draws the charts that observe/charts.py describes, with uPlot. The same file serves report.html and `shoal ui`. */
"use strict";

const shoal = (() => {
  const AXES = { step: "steps", tokens: "tokens", samples: "samples", hours: "time" };
  const WHOLE = [...Array(13).keys()].flatMap((power) => [1, 2, 5].map((digit) => digit * 10 ** power)); // there are no half steps
  const settings = { axis: "step", log: false, smoothing: 0 };
  const drawn = new Map(); // id → {element, plot, chart, wanted}
  let charts = [];

  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  const seriesColour = (index) => colour(`c${(index % 8) + 1}`);

  const UNITS = [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "k"]];
  function compact(value) {
    for (const [unit, name] of UNITS) {
      if (Math.abs(value) >= unit) return `${Number((value / unit).toPrecision(3))}${name}`;
    }
    return String(Number(value.toPrecision(4)));
  }
  // Amounts are drawn from zero, so that noise does not look like change.
  const FROM_ZERO = new Set(["tokens", "percent", "whole_percent", "gib", "seconds", "watts", "celsius"]);
  const FORMATS = {
    number: compact,
    small: (value) => (value === 0 ? "0" : Math.abs(value) < 0.01 ? value.toExponential(1) : compact(value)),
    tokens: compact,
    percent: (value) => `${Number((100 * value).toPrecision(3))}%`,
    whole_percent: (value) => `${Number(value.toPrecision(3))}%`,
    gib: (value) => `${Number(value.toPrecision(4))} GiB`,
    seconds: (value) => (Math.abs(value) < 1 ? `${Number((1000 * value).toPrecision(3))} ms` : `${Number(value.toPrecision(3))} s`),
    watts: (value) => `${Number(value.toPrecision(3))} W`,
    celsius: (value) => `${Number(value.toPrecision(3))} °C`,
  };
  /* Of a curve that hardly changes, several lines of the grid have the same label: it is written once. */
  const distinct = (labels) => labels.map((label, index) => (index && label === labels[index - 1] ? "" : label));
  const format = (name, value) => (value == null ? "–" : (FORMATS[name] || FORMATS.number)(value));
  function formatPlace(value) {
    if (value == null) return "";
    if (settings.axis !== "hours") return settings.axis === "step" ? value.toLocaleString("en") : compact(value);
    const minutes = value * 60;
    if (minutes < 1) return `${Number((minutes * 60).toPrecision(3))} s`;
    return minutes < 120 ? `${Number(minutes.toPrecision(3))} min` : `${Number(value.toPrecision(3))} h`;
  }

  /* Exponential moving average, corrected for its start. */
  function smooth(values) {
    if (!settings.smoothing) return values;
    let mean = 0, weight = 0;
    return values.map((value) => {
      if (value == null) return value;
      mean = settings.smoothing * mean + (1 - settings.smoothing) * value;
      weight = settings.smoothing * weight + (1 - settings.smoothing);
      return mean / weight;
    });
  }

  /* Points of one series, without those that have no place on the axis. */
  function points(series) {
    const places = [], values = [];
    const smoothed = series.points ? series.y : smooth(series.y);
    series[settings.axis].forEach((place, index) => {
      const value = smoothed[index];
      if (place == null || (settings.log && value <= 0)) return;
      if (places.length && place <= places[places.length - 1]) return; // uPlot needs ascending places
      places.push(place);
      values.push(value);
    });
    return [places, values];
  }

  function table(chart) {
    const tables = chart.series.map(points);
    for (const level of chart.levels) {
      const all = tables.flatMap(([places]) => places);
      const ends = all.length ? [Math.min(...all), Math.max(...all)] : [0, 1];
      tables.push(ends[0] === ends[1] ? [[ends[0]], [level.y]] : [ends, [level.y, level.y]]);
    }
    return uPlot.join(tables);
  }

  /* Dashed lines where the run was restarted or something failed. */
  function drawMarks(plot, chart) {
    const { ctx, bbox } = plot;
    ctx.save();
    ctx.strokeStyle = ctx.fillStyle = colour("bad");
    ctx.globalAlpha = 0.7;
    ctx.lineWidth = devicePixelRatio;
    ctx.setLineDash([4 * devicePixelRatio, 4 * devicePixelRatio]);
    for (const mark of chart.marks) {
      const place = mark[settings.axis];
      if (place == null) continue;
      const x = Math.round(plot.valToPos(place, "x", true));
      if (x < bbox.left || x > bbox.left + bbox.width) continue;
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
    }
    ctx.restore();
  }

  /* Two charts stand side by side, and are as high as each other. */
  const heightOf = (element) => (element.classList.contains("wide") || element.parentElement.children.length < 3 ? 280 : 200);

  function options(chart, element) {
    const axis = { stroke: colour("faint"), grid: { stroke: colour("grid"), width: 1 }, ticks: { stroke: colour("grid"), width: 1 }, font: "11px system-ui, sans-serif" };
    const dashed = chart.levels.map((level) => ({ label: level.label, stroke: colour("faint"), dash: [6, 5], width: 1.5, points: { show: false }, value: () => format(chart.format, level.y) }));
    return {
      width: Math.max(200, element.clientWidth - 28),
      height: heightOf(element),
      cursor: { sync: { key: "shoal", setSeries: false }, drag: { x: true, y: false }, focus: { prox: 24 }, points: { size: 7 } },
      focus: { alpha: 0.4 },
      legend: { live: true },
      scales: { x: { time: false }, y: { distr: settings.log ? 3 : 1, range: settings.log ? undefined : FROM_ZERO.has(chart.format) ? fromZero : padded } },
      axes: [
        { ...axis, values: (plot, places) => places.map(formatPlace), size: 30, space: 70, ...(settings.axis === "step" ? { incrs: WHOLE } : {}) },
        { ...axis, values: (plot, values) => distinct(values.map((value) => format(chart.format, value))), size: 58, space: 34 },
      ],
      series: [
        { label: AXES[settings.axis], value: (plot, place) => formatPlace(place) || "–" },
        ...chart.series.map((one, index) => ({
          label: one.label,
          stroke: seriesColour(one.colour ?? index),
          width: 2,
          dash: (one.colour ?? 0) >= 8 ? [7, 4] : undefined, // there are eight colours
          spanGaps: true,
          points: one.points ? { show: true, size: 6, fill: colour("surface") } : { show: one.y.length < 2, size: 6 },
          value: (plot, value) => format(chart.format, value),
        })),
        ...dashed,
      ],
      hooks: {
        draw: [(plot) => drawMarks(plot, chart)],
        setData: [showLast],
        ready: [showLast],
        setCursor: [(plot) => { if (plot.cursor.left < 0) showLast(plot); }],
      },
    };
  }

  /* Some room above and below, and for curves that hardly change. */
  function padded(plot, low, high) {
    if (low == null) return [0, 1];
    const room = Math.max(0.06 * (high - low), Math.abs(high) * (high === low ? 0.2 : 1e-3), 1e-12);
    return [low >= 0 && low - room < 0 ? 0 : low - room, high + room];
  }

  const fromZero = (plot, low, high) => (low == null ? [0, 1] : [Math.min(0, low), high > 0 ? high * 1.06 : 1]);

  /* Without a cursor the legend shows the last values; each series may end at another place. */
  function showLast(plot) {
    if (plot.cursor.left >= 0) return;
    const last = plot.data.map((values) => { let index = values.length - 1; while (index > 0 && values[index] == null) index--; return index; });
    if (plot.data[0].length) plot.setLegend({ idxs: last }, false);
  }

  /* The element of a chart: made here, or before. */
  function place(chart) {
    const known = document.getElementById(`chart-${chart.id}`);
    if (known) return known;
    const element = document.createElement("div");
    element.className = chart.id === "loss" ? "chart wide" : "chart";
    element.id = `chart-${chart.id}`;
    const title = document.createElement("h3");
    title.textContent = chart.title;
    element.append(title);
    document.getElementById("charts").append(element);
    return element;
  }

  function draw(chart) {
    let found = drawn.get(chart.id);
    const shape = JSON.stringify([settings.axis, settings.log, chart.series.map((one) => [one.label, one.colour]), chart.levels]);
    if (found && found.shape === shape) {
      found.chart.marks = chart.marks;
      describe(found.element, chart);
      const zoomed = found.zoomed();
      found.plot.setData(table(chart), !zoomed);
      if (zoomed) found.plot.redraw();
      return;
    }
    const element = found ? found.element : place(chart);
    if (found) found.plot.destroy();
    const shown = { ...chart };
    const plot = new uPlot(options(shown, element), table(chart), element);
    describe(element, chart);
    makeLegendsButtons(element);
    const zoomed = () => {
      const places = plot.data[0];
      return places.length > 1 && (plot.scales.x.min > places[0] || plot.scales.x.max < places[places.length - 1]);
    };
    drawn.set(chart.id, { element, plot, chart: shown, shape, zoomed });
  }

  /* For screen readers: what the picture shows. */
  function describe(element, chart) {
    const canvas = element.querySelector("canvas");
    const said = chart.series.map((one) => `${one.label} ${format(chart.format, one.y[one.y.length - 1])} after ${one.step[one.step.length - 1]} steps`);
    canvas.setAttribute("role", "img");
    canvas.setAttribute("aria-label", `${chart.title}: ${said.join(", ")}`);
  }

  /* For the keyboard: legends switch their series as a click does. */
  function makeLegendsButtons(element) {
    for (const head of element.querySelectorAll(".u-series:not(:first-child) th")) {
      head.tabIndex = 0;
      head.setAttribute("role", "button");
      head.addEventListener("keydown", (event) => {
        if (event.key === "Enter" || event.key === " ") { event.preventDefault(); head.click(); }
      });
    }
  }

  function redraw(again) {
    if (again) for (const one of drawn.values()) one.shape = "";
    charts.forEach(draw);
  }

  function setCharts(given) {
    if (!document.getElementById("charts")) return;
    charts = given;
    for (const [id, one] of drawn) {
      if (!charts.some((chart) => chart.id === id)) { one.plot.destroy(); one.element.remove(); drawn.delete(id); }
    }
    makeToolbar();
    charts.forEach(place); // all of them before the first is drawn: how many there are decides how wide each is
    redraw(false);
  }

  function makeToolbar() {
    const toolbar = document.getElementById("toolbar");
    if (!toolbar || toolbar.childElementCount || !charts.length) return;
    const available = Object.keys(AXES).filter((axis) => charts.some((chart) => chart.series.some((one) => one[axis].some((place) => place != null))));
    const choice = document.createElement("div");
    choice.className = "choice";
    choice.setAttribute("role", "group");
    choice.setAttribute("aria-label", "Horizontal axis");
    for (const axis of available) {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = AXES[axis];
      button.setAttribute("aria-pressed", String(axis === settings.axis));
      button.addEventListener("click", () => {
        settings.axis = axis;
        for (const other of choice.children) other.setAttribute("aria-pressed", String(other === button));
        redraw(true);
      });
      choice.append(button);
    }
    const log = document.createElement("input");
    log.type = "checkbox";
    log.addEventListener("change", () => { settings.log = log.checked; redraw(true); });
    const smoothing = document.createElement("input");
    Object.assign(smoothing, { type: "range", min: 0, max: 0.98, step: 0.02, value: 0 });
    smoothing.addEventListener("input", () => { settings.smoothing = Number(smoothing.value); redraw(true); });
    const hint = document.createElement("span");
    hint.className = "hint";
    hint.textContent = "Drag to zoom, double-click to reset.";
    toolbar.append(choice, labelled("Log scale", log), labelled("Smoothing", smoothing), hint);
  }

  function labelled(text, control) {
    const element = document.createElement("label");
    element.append(control, text);
    return element;
  }

  function copy(button) {
    const text = button.parentElement.querySelector("code").textContent;
    const done = () => { button.textContent = "Copied"; setTimeout(() => { button.textContent = "Copy"; }, 1500); };
    if (navigator.clipboard) return navigator.clipboard.writeText(text).then(done);
    getSelection().selectAllChildren(button.parentElement.querySelector("code")); // a page from disk has no clipboard
    document.execCommand("copy");
    getSelection().removeAllRanges();
    return done();
  }

  document.addEventListener("click", (event) => {
    const button = event.target.closest(".copy");
    if (button) copy(button);
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => redraw(true));
  let resizing;
  addEventListener("resize", () => {
    clearTimeout(resizing);
    resizing = setTimeout(() => {
      for (const { plot, element } of drawn.values()) plot.setSize({ width: Math.max(200, element.clientWidth - 28), height: heightOf(element) });
    }, 100);
  });

  const embedded = document.getElementById("chart-data");
  if (embedded) setCharts(JSON.parse(embedded.textContent));
  return { setCharts };
})();
