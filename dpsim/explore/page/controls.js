// The controls of a setting, and its text in the address of the page.

const POWERS = (first, last) => range(first, last + 1).map((power) => 2 ** power);
const ONE_TWO_FIVE = (first, last) =>
  range(first, last + 1).flatMap((power) => [1, 2, 5].map((each) => Number(`${each}e${power}`)));
const BANDWIDTHS = ONE_TWO_FIVE(7, 12).map((bits) => bits / 8);
const THRESHOLDS = [0, ...POWERS(10, 30), Infinity];

/**
 * The sliders: the field of the setting, its label, its stops, how a stop is shown, and for which settings it holds.
 * The stop null is what the machine, or the rule, says.
 */
function slidersOf(world) {
  const {machine} = world;
  const tables = machine.allreduce.length + machine.halves.length > 0;
  const own = (value, show, inTables = tables) => (inTables ? "as the tables say" : `the machine's: ${show(value)}`);
  const rulesOwn = ({fusion_rule}) => `the rule's: ${size(world.rules[fusion_rule].default_threshold_bytes)}`;
  const byLink = (setting) => !tables || setting.latency_s !== null || setting.bandwidth_bytes_per_s !== null;
  const linked = machine.link !== null;
  const sliders = [
    {name: "devices", label: "Devices", stops: DEVICES, show: count},
    {name: "local_batch", label: "Samples on each device", stops: world.local_batches, show: count},
    {name: "accumulate", label: "Micro-batches a step", stops: range(1, 17), show: String},
    {name: "fusion_threshold_bytes", label: "Fusion threshold", stops: [null, ...THRESHOLDS],
      show: (value, setting) => (value === null ? rulesOwn(setting) : size(value)),
      holds: (setting) => world.rules[setting.fusion_rule].default_threshold_bytes !== null},
    {name: "latency_s", label: "Latency of the link", stops: [null, 0, ...ONE_TWO_FIVE(-7, -3)],
      show: (value) => (value === null ? own(machine.link.latency_s, duration) : duration(value)), holds: () => linked},
    {name: "bandwidth_bytes_per_s", label: "Bandwidth of the link", stops: [null, ...BANDWIDTHS],
      show: (value) => (value === null ? own(machine.link.bandwidth_bytes_per_s, bandwidth) : bandwidth(value)),
      holds: () => linked},
    {name: "contention", label: "Contention beside backward", stops: [null, ...range(10, 41).map((each) => each / 10)],
      show: (value) => (value === null ? own(machine.contention ?? 1, times, false) : times(value)),
      holds: (setting) => setting.overlap === "thread" && (!machine.overlap.length || byLink(setting))},
  ];
  return sliders.map((slider) => ({...slider, stops: withValue(slider.stops, world.setting[slider.name])}));
}

/** Stops with the value that the page begins with; null stands first. */
function withValue(stops, value) {
  return stops.includes(value) ? stops : [...stops, value].sort((a, b) => (a ?? -1) - (b ?? -1));
}

const DEVICES = unique([...POWERS(0, 16), 3, 6, 12, 24, 48, 96, 100, 1000, 10000, 100000]).sort((a, b) => a - b);

/** The choices: the field, its label, and {value: words}. */
function choicesOf(world) {
  const {machine, rules, workload} = world;
  const named = (entries, priced) =>
    Object.fromEntries(Object.keys(entries).filter(priced).map((name) => [name, name]));
  const own = world.setting.devices_a_node;
  const nodes = {1: "1", 2: "2", 4: "4", 8: "8", 16: "16", [own]: String(own), 0: "not known (flat)"};
  const norms = {local: "of each device", global: "of all devices"};
  const normalises = workload.layers.some((layer) => layer.statistics_bytes[0] > 0);
  return [
    {name: "strategy", label: "Strategy", values: named(world.strategies, () => true)},
    {name: "overlap", label: "Overlap with backward", values: {
      off: "off", inline: "inline: computation waits", poll: "poll at each layer", thread: "thread beside it"}},
    {name: "fusion_rule", label: "Fusion rule", values: named(rules, isPricedRule)},
    {name: "algorithm", label: "Algorithm", values: named(machine.algorithms, (name) => !unknownTo([], [name]).length)},
    {name: "devices_a_node", label: "Devices of a node", values: nodes},
    ...(normalises ? [{name: "batch_norm", label: "Batch norm", values: norms}] : []),
  ];
}

const isPricedRule = (name) => !unknownTo([name], []).length;

/** A setting as the part of the address after #: what differs from the default. */
function written(setting, byDefault) {
  const parts = new URLSearchParams();
  for (const [name, value] of Object.entries(setting)) if (value !== byDefault[name]) parts.set(name, String(value));
  return parts.toString();
}

/** The setting that an address says; what is not understood keeps its default. */
function readSetting(address, byDefault, world) {
  const setting = {...byDefault};
  const stops = Object.fromEntries(slidersOf(world).map((each) => [each.name, each.stops]));
  const choices = Object.fromEntries(choicesOf(world).map((each) => [each.name, Object.keys(each.values)]));
  for (const [name, given] of new URLSearchParams(address)) {
    const number = given === "null" ? null : Number(given);
    if (stops[name]?.includes(number)) setting[name] = number;
    if (choices[name]?.includes(given)) setting[name] = name === "devices_a_node" ? number : given;
  }
  return setting;
}

/** The setting as the engine takes it. */
const forEngine = (world, setting) => ({...setting, strategy: world.strategies[setting.strategy]});
