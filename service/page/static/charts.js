// Charts, or a message in their place if the chart library is not installed.

import { colour } from "./colours.js";
import { element } from "./dom.js";

let library;

// The library has several megabytes, so it is loaded only with the first chart.
function loaded() {
  library ??= new Promise((resolve) => {
    const script = element("script", { src: "debug/assets/plotly.min.js" });
    script.onload = () => resolve(true);
    script.onerror = () => resolve(false);
    document.head.append(script);
  });
  return library;
}

// The library interprets tags and entities in labels: escape them.
export function label(text) {
  return text.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");
}

// A log axis with readable numbers: powers of ten, and three times them where there are few.
export function logAxis(values) {
  const logs = values.filter((value) => value > 0 && Number.isFinite(value)).map(Math.log10);
  const [low, high] = logs.length ? [Math.floor(Math.min(...logs)), Math.ceil(Math.max(...logs))] : [0, 1];
  const every = Math.max(1, Math.ceil((high - low) / 5));
  const powers = Array.from({ length: high - low + 1 }, (_, index) => low + index).filter((power) => (power - low) % every === 0);
  const tickvals = powers.flatMap((power) => (high - low < 3 ? [10 ** power, 3 * 10 ** power] : [10 ** power]));
  return {
    type: "log", tickvals, range: [low - 0.1, Math.max(high, low + 1) + 0.1],
    ticktext: tickvals.map((value) => (value < 1e-3 || value >= 1e4 ? value.toExponential(0).replace("+", "").replace("-", "−") : String(Number(value.toPrecision(1))))),
  };
}

// Mark a position of the x axis by a line. Charts that are not drawn yet have the mark when they are.
export function mark(container, x) {
  container.dataset.mark = x;
  if (container.layout) globalThis.Plotly.relayout(container, { shapes: [...container.shapes, line(x)] });
}

function line(x) {
  return { type: "line", yref: "paper", y0: 0, y1: 1, x0: x, x1: x, line: { color: colour("text"), width: 1, dash: "dot" } };
}

export function chart(description, height, traces, layout) {
  const container = element("div", { className: "chart", role: "img", style: { "min-height": `${height}px` }, aria: { label: description } });
  draw(container, height, traces, layout);
  return container;
}

async function draw(container, height, traces, layout) {
  if (!(await loaded())) {
    container.style.removeProperty("min-height");
    container.replaceChildren("The chart library is not installed. Install Vitrine with the extra 'torch'.");
    return;
  }
  // A redraw may have removed the container in the meantime.
  if (!container.isConnected) return;
  const axis = { gridcolor: colour("line"), linecolor: colour("line"), zerolinecolor: colour("line"), automargin: true };
  const { xaxis, yaxis, shapes = [], ...others } = layout;
  container.shapes = shapes;
  await globalThis.Plotly.newPlot(container, traces, {
    height,
    margin: { l: 8, r: 8, t: 8, b: 8 },
    paper_bgcolor: "transparent",
    plot_bgcolor: "transparent",
    font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: colour("text") },
    hoverlabel: { align: "left" },
    xaxis: { ...axis, ...xaxis },
    yaxis: { ...axis, ...yaxis },
    shapes: container.dataset.mark === undefined ? shapes : [...shapes, line(Number(container.dataset.mark))],
    ...others,
  }, { displayModeBar: false, responsive: true });
}
