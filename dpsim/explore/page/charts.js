// The charts, as inline SVG in the pixels of their place: text keeps its size, and as many labels are drawn as fit.

const LETTER_PX = 7;

/** An SVG element with attributes and children (elements, or one text). */
function svg(name, attributes = {}, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

function replaceChart(place, height, title, ...children) {
  const width = place.clientWidth;
  const attributes = {width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": title};
  place.replaceChildren(svg("svg", attributes, ...children));
}

const text = (x, y, label, anchor = "middle") => svg("text", {x, y, "text-anchor": anchor}, label);
const wideAs = (label) => LETTER_PX * label.length;

/** Round numbers from 0 to at most `most`, so many that their labels have room. */
function ticks(most, room) {
  const rough = most / Math.max(room, 1);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((each) => each * power >= rough * 0.999);
  return range(0, Math.floor(most / step * 1.0001) + 1).map((i) => i * step);
}

/** Those of labelled places that do not run into the one before. */
function apart(labels) {
  let reached = -Infinity;
  return labels.filter(({x, label}) => {
    const begin = x - wideAs(label) / 2;
    if (begin < reached + LETTER_PX) return false;
    reached = begin + wideAs(label);
    return true;
  });
}

// The step as a Timeline: two lanes, and the buckets that leave backward.

const LANE_OF = {"forward": "forward", "backward": "backward", "update": "update"};
const TIMELINE = {top: 26, lane: 38, gap: 46, side: 10, foot: 30};
const TIMELINE_OF_SEVERAL = {...TIMELINE, lane: 20, gap: 34};

/** The names of the rank classes of a strategy: its stages, the parts of a layer, or both; "" where there is one. */
function classNames({stages, parts}) {
  return range(0, stages * parts).map((i) => [
    ...(stages > 1 ? [`stage ${Math.floor(i / parts) + 1}`] : []),
    ...(parts > 1 ? [`part ${i % parts + 1}`] : []),
  ].join(", "));
}

/** What the operations of every rank class do, as boxes {sent, colour, begin, end, name, bucket, kind, rank_class}. */
function boxes(it, layers) {
  const queued = range(0, it.operations.length).filter((i) => QUEUED.has(it.operations[i].kind));
  const made = [];
  it.operations.forEach(({kind, layer, bucket, size_bytes, rank_class = 0}, i) => {
    const sent = QUEUED.has(kind) || WAITED_FOR.has(kind);
    const ofLayer = layer >= 0 ? ` of ${layers[layer].name}` : "";
    const name = bucket >= 0 ? `${kind} of bucket ${bucket + 1}, ${size(size_bytes)}` : kind + ofLayer;
    const colour = sent ? "exposed" : LANE_OF[kind] ?? "other";
    const within = (k) => (it.operations[k].rank_class ?? 0) === rank_class
      && it.start[k] >= it.start[i] && it.end[k] <= it.end[i];
    const paused = sent || it.plan.overlap !== "inline" ? [] : queued.filter(within);
    const edges = [it.start[i], ...paused.flatMap((k) => [it.start[k], it.end[k]]), it.end[i]];
    for (let e = 0; e < edges.length; e += 2) {
      const [begin, end] = edges.slice(e, e + 2);
      if (end > begin) made.push({sent, colour, begin, end, name, bucket, kind, rank_class});
    }
  });
  return made.sort((a, b) => a.begin - b.begin);
}

/** Boxes of one lane whose neighbours of one colour are joined where they are too narrow to be seen. */
function joined(lane, x) {
  const shown = [];
  for (const box of lane) {
    const last = shown.at(-1);
    const alike = last && last.colour === box.colour;
    if (alike && x(last.end) - x(last.begin) < 2 && x(box.begin) - x(last.end) < 0.5) last.end = box.end;
    else shown.push({...box});
  }
  return shown;
}

function drawTimeline(place, it, layers) {
  const classes = classNames(it.plan.strategy);
  const {top, lane, gap, side, foot} = classes.length > 1 ? TIMELINE_OF_SEVERAL : TIMELINE;
  const width = place.clientWidth;
  const x = (seconds) => side + (width - 2 * side) * seconds / it.step_s;
  const above = (rankClass) => top + rankClass * (top + 2 * lane + gap);
  const below = (rankClass) => above(rankClass) + lane + gap;
  const bottom = below(classes.length - 1) + lane;
  const all = boxes(it, layers);
  const drawn = (sent, rankClass, y) => joined(all.filter((box) =>
    box.sent === sent && box.rank_class === rankClass), x).map((box) => {
    const wide = x(box.end) - x(box.begin);
    const label = box.bucket >= 0 && sent ? String(box.bucket + 1) : "";
    const rect = svg("rect", {x: x(box.begin), y, width: Math.max(wide, 0.75), height: lane, class: box.colour},
      svg("title", {}, `${box.name}: ${duration(box.end - box.begin)}`));
    if (!label || wide < wideAs(label) + 4) return rect;
    const inside = text(x(box.begin) + wide / 2, y + lane / 2 + 4, label);
    inside.setAttribute("class", "inside");
    return svg("g", {}, rect, inside);
  });
  const leaving = [];
  const before = classes.map(() => -Infinity);
  it.operations.forEach(({kind, after, rank_class = 0}, i) => {
    if (kind !== "allreduce" && kind !== "reduce-scatter") return;
    const ready = Math.max(...after.map((each) => it.ready[each] || it.end[each]));
    if (x(it.start[i]) - before[rank_class] < 2) return;
    before[rank_class] = x(it.start[i]);
    const [from, to] = [above(rank_class) + lane, below(rank_class)];
    leaving.push(svg("path", {d: `M${x(ready)},${from} L${x(it.start[i])},${to}`, class: "leaving"}));
  });
  const [scale, unit] = it.step_s >= 1 ? [1, "s"] : it.step_s >= 1e-3 ? [1e-3, "ms"] : [1e-6, "us"];
  const marks = ticks(it.step_s / scale, width / 80)
    .map((value) => ({x: x(value * scale), label: `${digits(value)} ${unit}`}));
  const inside = apart(marks.filter((mark) => mark.x + wideAs(mark.label) / 2 < width))
    .map((mark, i) => (i === 0 ? {...mark, x: side, anchor: "start"} : mark));
  replaceChart(place, bottom + foot, `Timeline of a step of ${duration(it.step_s)}`,
    ...leaving,
    ...classes.flatMap((name, i) => [
      text(side, above(i) - 8, name ? `${name}: computation` : "computation", "start"),
      text(side, below(i) - 8, "communication", "start"),
      ...drawn(false, i, above(i)), ...drawn(true, i, below(i))]),
    svg("line", {x1: side, x2: width - side, y1: bottom + 6, y2: bottom + 6, class: "axis"}),
    ...inside.map((mark) => text(mark.x, bottom + 22, mark.label, mark.anchor)),
    svg("rect", {class: "later", x: width - side, y: top, width: 0, height: bottom - top}),
    svg("line", {class: "cursor", x1: -9, x2: -9, y1: top - 4, y2: bottom + 6}));
}

/** Show the step up to an instant; what comes later is veiled. `share` 1 shows all. */
function moveCursor(place, share) {
  const [later, cursor] = [place.querySelector(".later"), place.querySelector(".cursor")];
  const {side} = TIMELINE;
  const at = side + (place.clientWidth - 2 * side) * share;
  later.setAttribute("x", at);
  later.setAttribute("width", share < 1 ? place.clientWidth - side - at : 0);
  for (const end of ["x1", "x2"]) cursor.setAttribute(end, share < 1 ? at : -9);
}

// Lines over places on the x axis, with marks.

const FRAME = {left: 64, right: 14, top: 14, foot: 46};

/**
 * A chart of `areas` [{name, points: [[x, low, high]]}], `lines` [{name, points: [[x, y]]}] and `marks` [{name, x, y,
 * low, high}]. `xs` are labelled values of x, in order; x and y are given as shares of the axes by the functions
 * `across` and `up`.
 */
function drawLines(place, {title, xs, ys, across, up, xTitle, areas = [], lines, marks}) {
  const {left, right, top, foot} = FRAME;
  const [width, height] = [place.clientWidth, 280];
  const x = (value) => left + (width - left - right) * across(value);
  const y = (value) => height - foot - (height - foot - top) * Math.min(Math.max(up(value), 0), 1);
  const labels = apart(xs.map(({value, label}) => ({x: x(value), label})));
  const path = (points) => points.filter(([, value]) => Number.isFinite(value))
    .map(([at, value], i) => `${i ? "L" : "M"}${x(at)},${y(value)}`).join("");
  const outline = (points) =>
    [...points.map(([at, low]) => [at, low]), ...points.map(([at, , high]) => [at, high]).reverse()];
  const band = ({name, x: at, low, high}) =>
    svg("line", {x1: x(at), x2: x(at), y1: y(low), y2: y(high), class: `band ${name}`});
  replaceChart(place, height, title,
    ...ys.map(({value}) => svg("line", {x1: left, x2: width - right, y1: y(value), y2: y(value), class: "guide"})),
    ...ys.map(({value, label}) => text(left - 8, y(value) + 4, label, "end")),
    ...labels.map((label) => text(label.x, height - foot + 18, label.label)),
    text((left + width - right) / 2, height - 6, xTitle),
    ...areas.map(({name, points}) => svg("path", {d: path(outline(points)), class: `area ${name}`})),
    ...lines.map(({name, points}) => svg("path", {d: path(points), class: `line ${name}`})),
    ...marks.filter(({low}) => low !== undefined).map(band),
    ...marks.map(({name, x: at, y: value}) =>
      svg("circle", {cx: x(at), cy: y(value), r: name === "measured" ? 4 : 5.5, class: name})));
}

/** Speedup against devices, both logarithmic, with the line of perfect scaling; `band` is [[devices, low, high]]. */
function drawSpeedup(place, points, band, now, measured) {
  const most = points.at(-1)[0];
  const reached = [...points, ...band].flatMap(([, ...values]) => values);
  const highest = Math.max(2, ...reached, ...measured.map(({y}) => y)) * 1.25;
  const corner = Math.min(most, highest);
  const powers = range(0, Math.floor(Math.log2(most)) + 1).map((power) => 2 ** power);
  const heights = range(0, Math.floor(Math.log2(highest)) + 1).map((power) => 2 ** power);
  const every = Math.ceil(heights.length / 9);
  const lowest = Math.min(1, ...reached);
  drawLines(place, {
    title: `Speedup against devices, ${digits(now.y)} on ${count(now.x)}`,
    xs: powers.map((value) => ({value, label: count(value)})),
    ys: heights.filter((_, i) => i % every === 0).map((value) => ({value, label: count(value)})),
    across: (value) => Math.log2(value) / Math.max(Math.log2(most), 1),
    up: (value) => Math.log2(value / lowest) / Math.log2(highest / lowest),
    xTitle: "devices",
    areas: [{name: "predicted", points: band}],
    lines: [{name: "ideal", points: [[1, 1], [corner, corner]]}, {name: "predicted", points}],
    marks: [...measured, {name: "predicted", ...now}],
  });
}

/** The step against the fusion threshold; `points` are [place among the stops, seconds]. */
function drawThresholds(place, stops, points, now, best, measured) {
  const highest = Math.max(...points.map(([, seconds]) => seconds), now?.high ?? 0, ...measured.map(({y}) => y)) * 1.08;
  const [scale, unit] = highest >= 1 ? [1, "s"] : highest >= 1e-3 ? [1e-3, "ms"] : [1e-6, "us"];
  drawLines(place, {
    title: "The predicted step against the fusion threshold",
    xs: stops.map((stop, value) => ({value, label: size(stop)})),
    ys: ticks(highest / scale, 5).map((value) => ({value: value * scale, label: `${digits(value)} ${unit}`})),
    across: (value) => (value + 0.4) / (stops.length - 0.2),
    up: (value) => value / highest,
    xTitle: "fusion threshold",
    lines: [{name: "predicted", points}],
    marks: [...measured, ...(best ? [{name: "best", ...best}] : []), ...(now ? [{name: "predicted", ...now}] : [])],
  });
}
