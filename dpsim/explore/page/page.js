// The page: its controls change the setting, and every change computes and draws everything again.

const world = JSON.parse(document.getElementById("world").textContent, revived);
const byDefault = world.setting;
const find = (id) => document.getElementById(id);
let setting = readSetting(location.hash.slice(1), byDefault, world);
let shown = null; // the prediction that is drawn
let speedupBand = {of: null, points: []}; // of a setting: [devices, low, high] along the curve of the speedup

const sliders = slidersOf(world).map((slider) => {
  const ends = {min: 0, max: slider.stops.length - 1, step: 1};
  const input = Object.assign(document.createElement("input"), {type: "range", id: slider.name, ...ends});
  const value = Object.assign(document.createElement("output"), {htmlFor: slider.name});
  input.addEventListener("input", () => change({[slider.name]: slider.stops[input.value]}));
  return {...slider, input, value, row: controlRow(slider, input, value)};
});
const choices = choicesOf(world).map((choice) => {
  const input = Object.assign(document.createElement("select"), {id: choice.name});
  for (const [value, words] of Object.entries(choice.values)) input.append(new Option(words, value));
  const chosen = () => (choice.name === "devices_a_node" ? Number(input.value) : input.value);
  input.addEventListener("change", () => change({[choice.name]: chosen()}));
  return {...choice, input, row: controlRow(choice, input)};
});
find("sliders").append(...sliders.map((each) => each.row));
find("choices").append(...choices.map((each) => each.row));

const unknown = unknownTo(Object.keys(world.rules), Object.keys(world.machine.algorithms));
if (unknown.length) {
  const words = `Left out, for this page does not compute them: ${unknown.join(", ")}.`;
  find("notes").append(Object.assign(document.createElement("li"), {textContent: words}));
}

function controlRow({name, label}, input, ...others) {
  const row = document.createElement("div");
  row.className = "control";
  row.append(Object.assign(document.createElement("label"), {htmlFor: name, textContent: label}), ...others, input);
  return row;
}

function change(fields) {
  setting = {...setting, ...fields};
  update();
}

/** Show a setting in the controls, predict it, and draw it. */
function update() {
  for (const {name, stops, show, holds, input, value, row} of sliders) {
    row.hidden = holds ? !holds(setting) : false;
    if (row.hidden) continue;
    input.value = stops.indexOf(setting[name]);
    value.textContent = show(setting[name], setting);
    input.setAttribute("aria-valuetext", value.textContent);
  }
  for (const {name, input} of choices) input.value = setting[name];
  stop();
  try {
    shown = predict(world, forEngine(world, setting));
    say("");
    draw();
  } catch (error) {
    say(`${error.message[0].toUpperCase()}${error.message.slice(1)}: choose another setting.`);
  }
  later(settle);
}

function say(refusal) {
  find("refusal").textContent = refusal;
  for (const id of ["numbers", "answers"]) find(id).hidden = Boolean(refusal);
}

/** Draw what the setting's prediction says. */
function draw() {
  const it = shown;
  const one = stepOrNever(world, {...setting, devices: 1, devices_a_node: 0, strategy: "data-parallel"});
  const speedup = it.plan.data_devices * one / it.step_s;
  const parts = MEMORY_PARTS.filter((part) => it.memory[part]);
  find("memory").textContent = size(it.memory.total) + (it.memory.activations === null ? " +" : "");
  find("memory-parts").textContent = `Memory of a device: ${parts.map((part) =>
    `${part.replace("_", " ")} ${size(it.memory[part])}`).join(", ")}${
    it.memory.activations === null ? "; activations, which the workload does not state, come on top" : ""}${
    it.memory.total > world.machine.memory_bytes ? "; the machine has less" : ""}.`;
  find("step").textContent = duration(it.step_s);
  find("band").textContent = span(it.low_s, it.high_s);
  find("level").textContent = world.level;
  find("exposed").textContent = duration(it.exposed_s);
  find("rate").textContent = count(Number(digits(it.samples_per_s)));
  find("speedup").textContent = digits(speedup);
  find("efficiency").textContent = percent(speedup / setting.devices);
  find("buckets").textContent = count(it.buckets.length);
  find("extrapolated").hidden = !it.extrapolated;
  drawTimeline(find("timeline"), it, world.workload.layers);
  drawSpeedups(one, speedup);
  drawSteps();
}

/** The devices of the curve of the speedup. */
function devicesOfCurve() {
  const last = Math.max(64, Math.min(DEVICES.at(-1), 4 * setting.devices));
  return DEVICES.filter((devices) => devices <= last);
}

function drawSpeedups(one, speedup) {
  const {classes} = world.strategies[setting.strategy];
  const band = speedupBand.of === setting ? speedupBand.points : [];
  const curve = devicesOfCurve().map((devices) =>
    [devices, Math.floor(devices / classes) * one / stepOrNever(world, {...setting, devices})]);
  const measuredOne = world.measured.find((each) => each.devices === 1 && each.local_batch === setting.local_batch);
  const measured = measuredOne ? measuredHere(["devices"]).map((each) =>
    ({name: "measured", x: each.devices, y: each.devices * measuredOne.step_s / each.step_s})) : [];
  find("measured-speedup").hidden = !measured.length;
  const possible = curve.filter(([, value]) => value > 0);
  drawSpeedup(find("speedups"), possible, band, {x: setting.devices, y: speedup}, measured);
}

function drawSteps() {
  const takes = world.rules[setting.fusion_rule].default_threshold_bytes !== null && setting.devices > 1;
  find("thresholds").hidden = !takes;
  if (!takes) return;
  const points = THRESHOLDS.map((fusion_threshold_bytes, i) =>
    [i, stepOrNever(world, {...setting, fusion_threshold_bytes})]);
  const [i, best] = points.reduce((a, b) => (b[1] < a[1] ? b : a));
  const place = placeOf(shown.plan.threshold_bytes);
  const measured = measuredHere(["fusion_threshold_bytes"]).map((each) =>
    ({name: "measured", x: placeOf(each.fusion_threshold_bytes), y: each.step_s, low: each.low_s, high: each.high_s}));
  const now = {x: place, y: shown.step_s, low: shown.low_s, high: shown.high_s};
  find("measured-step").hidden = !measured.length;
  drawThresholds(find("steps"), THRESHOLDS, points, now, {x: i, y: best}, measured);
  find("best-threshold").textContent = `${size(THRESHOLDS[i])} is fastest with this rule: ${duration(best)}`;
}

/** Where a threshold stands among the stops, between two of them where it is none of them. */
function placeOf(bytes) {
  const above = THRESHOLDS.findIndex((each) => each >= bytes);
  if (above <= 1 || THRESHOLDS[above] === bytes) return above;
  const low = THRESHOLDS[above - 1];
  const high = THRESHOLDS[above] === Infinity ? 2 * low : THRESHOLDS[above];
  return above - 1 + Math.min(Math.log2(bytes / low) / Math.log2(high / low), 1);
}

const MEASURED_FIELDS = ["devices", "local_batch", "accumulate", "strategy", "overlap", "fusion_rule", "algorithm",
  "batch_norm", "fusion_threshold_bytes"];

/** The measured points of this setting, but for some fields. */
function measuredHere(open) {
  const own = {...setting, fusion_threshold_bytes: shown.plan.threshold_bytes};
  const fixed = MEASURED_FIELDS.filter((name) => !open.includes(name));
  return world.measured.filter((each) => fixed.every((name) => each[name] === own[name]));
}

// What follows when the setting stays as it is for a moment: the address, what a screen reader says, the band of the
// speedup, the best setting.

let waiting = 0;
function later(action) {
  clearTimeout(waiting);
  waiting = setTimeout(action, 250);
}

function settle() {
  const address = written(setting, byDefault);
  history.replaceState(null, "", address ? `#${address}` : location.pathname + location.search);
  const refusal = find("refusal").textContent;
  const [step, band, speedup] = ["step", "band", "speedup"].map((id) => find(id).textContent);
  find("status").textContent = refusal || `Predicted step ${step}, ${band}; speedup ${speedup}.`;
  if (world.files) find("command").textContent = command();
  if (!refusal) computeBand(search);
}

/** Do something with each of those left while nothing else is to be done, a few milliseconds at a time; then `end`. */
function inPieces(left, each, end, asked = setting) {
  if (asked !== setting) return;
  const until = performance.now() + 8;
  while (left.length && performance.now() < until) each(left.pop());
  if (left.length) setTimeout(inPieces, 0, left, each, end, asked);
  else end();
}

/** The interval of the speedup along its curve; then what follows. */
function computeBand(next) {
  const points = [];
  const one = predict(world, onOneDevice(forEngine(world, setting)));
  const add = (devices) => {
    const several = predictionOrNone(world, {...setting, devices});
    if (several) points.unshift([devices, ...speedupEnds(world, one, several)]);
  };
  inPieces(devicesOfCurve(), add, () => {
    speedupBand = {of: setting, points};
    draw();
    next();
  });
}

const NOTICED = 0.005; // the share of the step by which another setting is called faster

/** Compare what may be faster. */
function search() {
  let found = {best: setting, step: shown.step_s};
  inPieces(candidates(world, setting), (best) => {
    const step = stepOrNever(world, best);
    if (step < found.step * (1 - 1e-9)) found = {best, step};
  }, () => showBest(found.step < shown.step_s * (1 - NOTICED) ? found : {best: setting, step: shown.step_s}));
}

function showBest({best, step}) {
  const bytes = best.fusion_threshold_bytes ?? world.rules[best.fusion_rule].default_threshold_bytes;
  const named = `${best.strategy}, ${best.fusion_rule}${bytes === null ? "" : `, threshold ${size(bytes)}`}`;
  const words = best === setting ? "No other strategy, fusion rule or threshold is faster here by 0.5 %."
    : `Fastest here: ${named}: ${duration(step)}, ${digits(shown.step_s / step)} times as fast.`;
  const within = step > shown.low_s && best !== setting ? " The difference lies within the interval." : "";
  find("best").textContent = words + within;
  find("use").hidden = best === setting;
  find("use").onclick = () => {
    change(best);
    find("strategy").focus();
  };
}

/** The same prediction on the command line. */
function command() {
  const layout = shown.plan.layout;
  const {algorithm, overlap, strategy, fusion_threshold_bytes: threshold} = setting;
  const flags = {devices: layout || setting.devices, "local-batch": setting.local_batch,
    "fusion-rule": setting.fusion_rule, algorithm, strategy, set: `overlap=${overlap}`};
  if (setting.accumulate > 1) flags.set += `,accumulate=${setting.accumulate}`;
  if (shown.plan.fusion_threshold_bytes !== null) flags["fusion-threshold"] = size(threshold).replace(" ", "");
  if (setting.batch_norm !== "local") flags["batch-norm"] = setting.batch_norm;
  if (setting.contention !== null) flags.assume = `contention=${setting.contention}`;
  const moved = setting.latency_s !== null || setting.bandwidth_bytes_per_s !== null;
  const given = Object.entries(flags).map(([name, value]) => `--${name} ${value}`).join(" ");
  return `dpsim predict ${world.files} ${given}${moved ? "  # with [link] of the machine file changed" : ""}`;
}

// Play: the step, six seconds long.

const PLAY_MS = 6000;
let frame = 0;
function stop() {
  cancelAnimationFrame(frame);
  frame = 0;
  find("play").textContent = "Play the step";
  find("moment").textContent = "";
}
find("play").addEventListener("click", () => {
  if (frame) {
    stop();
    moveCursor(find("timeline"), 1);
    return;
  }
  const begun = performance.now();
  const all = boxes(shown, world.workload.layers);
  const classes = classNames(shown.plan.strategy);
  find("play").textContent = "Stop";
  const go = (time) => {
    const share = Math.min(Math.max((time - begun) / PLAY_MS, 0), 1);
    moveCursor(find("timeline"), share);
    const now = share * shown.step_s;
    const running = all.filter((box) => box.begin <= now && now < box.end).map((box) =>
      (classes[box.rank_class] ? `${classes[box.rank_class]}: ${box.kind}` : box.name));
    find("moment").textContent = share < 1 ? `${duration(now)}: ${running.join("; ") || "waiting"}` : "";
    if (share < 1) frame = requestAnimationFrame(go);
    else stop();
  };
  frame = requestAnimationFrame(go);
});

find("reset").addEventListener("click", () => change(byDefault));
addEventListener("hashchange", () => {
  setting = readSetting(location.hash.slice(1), byDefault, world);
  update();
});
new ResizeObserver(() => shown && !find("answers").hidden && draw()).observe(find("answers"));
update();
