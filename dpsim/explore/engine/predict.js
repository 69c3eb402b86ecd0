// The predicted step of a setting, as dpsim/model/step.py and horovod.py. A setting has the names of a
// dpsim.Plan; its `latency_s`, `bandwidth_bytes_per_s` and `contention` are null where the machine's own hold.

/**
 * {step_s, low_s, high_s, shifts, exposed_s, cost_s, extrapolated, buckets, samples_per_s, memory, operations, start,
 * end, ready, plan}.
 * Throws an Error with a sentence for a setting that is impossible, or that the machine does not price.
 */
function predict(world, setting) {
  const varied = variedWorld(world, setting);
  const plan = planOf(varied, setting);
  const schedule = scheduled(varied, plan);
  const exact = price(varied, plan, schedule, EXACT);
  const free = plan.devices > 1 ? price(varied, plan, schedule, FREE_NETWORK) : exact;
  const samples = plan.local_batch * plan.accumulate * plan.data_devices;
  return {
    ...exact,
    ...interval(varied, plan, schedule, exact.step_s),
    cost_s: exact.step_s - free.step_s,
    samples_per_s: exact.step_s > 0 ? samples / exact.step_s : Infinity,
    memory: memory(varied, plan, schedule),
    plan,
  };
}

/** The step of a setting in seconds, without its interval. */
function stepS(world, setting) {
  const varied = variedWorld(world, setting);
  const plan = planOf(varied, setting);
  return price(varied, plan, scheduled(varied, plan), EXACT).step_s;
}

const ALONE = {name: "data-parallel", text: "data-parallel", stages: 1, parts: 1, classes: 1};

/** The setting on one device that a setting is compared with: the same samples at once. */
const onOneDevice = (setting) => ({...setting, devices: 1, devices_a_node: 0, strategy: ALONE});

/** The world with the link and the contention that a setting states. */
const variedWorld = remembered(({devices, devices_a_node, latency_s, bandwidth_bytes_per_s, contention}) =>
  [devices, devices_a_node, latency_s, bandwidth_bytes_per_s, contention].join(), (world, setting) => {
  const {constants} = world;
  const machine = {...world.machine, constants};
  if (setting.latency_s !== null || setting.bandwidth_bytes_per_s !== null) {
    const inside = setting.devices_a_node > 0 && setting.devices <= setting.devices_a_node && machine.link_in_node;
    const name = inside ? "link_in_node" : "link";
    const moved = {};
    if (setting.latency_s !== null) moved.latency_s = setting.latency_s;
    if (setting.bandwidth_bytes_per_s !== null) moved.bandwidth_bytes_per_s = setting.bandwidth_bytes_per_s;
    const link = {...machine[name], ...moved};
    Object.assign(machine, {[name]: link, allreduce: [], halves: [], overlap: [], of_one_node: false, of_several_nodes: false,
      devices_a_node: 1, largest_node: null});
    if (machine.emulated_link) machine.emulated_link = {...machine.emulated_link, ...moved};
  }
  if (setting.contention !== null) {
    const assumed = machine.assumed.filter((field) => field !== "contention");
    Object.assign(machine, {contention: setting.contention, contention_uncertainty: constants.CERTAIN, assumed});
  }
  return {...world, machine};
});

/** The plan of a setting: its layout, its rule and threshold, and the collective that adds up its gradients. */
function planOf({rules, machine}, setting) {
  const rule = rules[setting.fusion_rule];
  const nodes = setting.devices / setting.devices_a_node;
  const inNodes = nodes >= 1 ? `${nodes}x${setting.devices_a_node}` : `1x${setting.devices}`;
  const layout = setting.devices_a_node ? inNodes : "";
  const {devices, algorithm, strategy} = setting;
  const {parts, classes} = strategy;
  const data_devices = Math.floor(devices / classes);
  const kind = strategy.sharded ? "reduce-scatter" : "allreduce";
  const group = spreadLayout(groupLayout(layout, data_devices * parts), parts);
  const byMessages = ["messages", "library"].includes(machine.algorithms[algorithm]?.place);
  const joins = byMessages && parts > 2 ? "direct" : algorithm; // as Plan.joining
  const takesThreshold = rule.default_threshold_bytes !== null;
  const plan = {
    ...setting,
    rule,
    layout,
    data_devices,
    fusion_threshold_bytes: takesThreshold ? setting.fusion_threshold_bytes : null,
    threshold_bytes: takesThreshold ? setting.fusion_threshold_bytes ?? rule.default_threshold_bytes : 0,
    joining: {algorithm: joins, devices: parts, layout: groupLayout(layout, parts), kind: "allreduce"},
  };
  const refusal = refused(machine, plan);
  if (refusal) throw new Error(refusal);
  return {...plan, collective: priced(machine, {algorithm, devices: data_devices, layout: group, kind})};
}

/** Those of some fusion rules and algorithms that the engine does not have: plug-ins. */
function unknownTo(rules, algorithms) {
  return [...rules.filter((name) => !(name in FUSION_RULES) && name !== "horovod"),
    ...algorithms.filter((name) => !(name in ALGORITHMS))];
}

/** Why a plan is impossible, as dpsim/constraints.py says it; empty if it is not. */
function refused(machine, plan) {
  const {devices, devices_a_node, rule, strategy, algorithm, layout, batch_norm, overlap, accumulate} = plan;
  const [unknown] = unknownTo([plan.fusion_rule], [algorithm]);
  if (unknown) return `${unknown} is not among what this page computes`;
  const {classes, parts, sharded} = strategy;
  if (devices % classes) return `${strategy.text} needs a multiple of ${classes} devices`;
  if (devices_a_node && devices > devices_a_node && devices % devices_a_node) {
    return `${devices} devices do not fill nodes of ${devices_a_node}`;
  }
  const uneven = [parts, parts * plan.data_devices].some((group) => group % devices_a_node && devices_a_node % group);
  if (layout && devices > devices_a_node && uneven) {
    return `${strategy.text} on ${devices} devices would divide nodes of ${devices_a_node} unevenly`;
  }
  if (algorithm === "hierarchical" && devices > 1 && !layout) return "hierarchical needs devices in nodes";
  if (strategy.text !== ALONE.text && rule.while_running) {
    return `${strategy.name} needs a fusion rule that decides beforehand`;
  }
  if (sharded && !machine.algorithms[algorithm].has_reduce_scatter) {
    return `${strategy.name} needs an algorithm with a reduce-scatter, which ${algorithm} does not have`;
  }
  if (classes > 1 && batch_norm === "global") return `${strategy.name} needs batch norm of each device`;
  if (batch_norm === "global" && accumulate > 1) return "global batch norm needs one micro-batch a step";
  if (batch_norm === "global" && overlap === "inline" && rule.while_running) {
    return "global batch norm under this rule needs another overlap than inline";
  }
  return "";
}

/** The collective whose cost stands for this one's: in shared memory "auto" may be MPI's, as may all between nodes. */
function priced(machine, collective) {
  const {algorithm, devices, layout} = collective;
  const names = (tables) => new Set(tables.map((table) => table.algorithm));
  const measured = names(machine.allreduce.filter((each) => each.devices === devices && each.layout === layout));
  if (measured.has(algorithm) || machine.algorithms[algorithm].place !== "shared memory") return collective;
  const known = measured.size ? measured : names(machine.allreduce);
  const library = algorithm === "auto" && !known.has("auto") && known.has("mpi");
  return library || nodeCounts(layout, 1)[0] > 1 ? {...collective, algorithm: "mpi"} : collective;
}

function scheduled(world, plan) {
  if (!plan.rule.needs_costs) return lower(world, plan, {});
  const {workload, machine} = world;
  const [alpha_s, beta_s_per_byte] = nearestLine(machine, plan.collective);
  return lower(world, plan, {alpha_s, beta_s_per_byte, ready_s: readyTimes(workload, plan.local_batch)});
}

/** The walk over a schedule with its prices. The step lasts until its input is prepared. */
function price(world, plan, schedule, factors) {
  const {workload} = world;
  const prices = pricesOf(world, plan, schedule, factors);
  const decided = plan.rule.while_running && plan.devices > 1 ? decidedWhileRunning(workload, plan, prices) : schedule;
  const walked = walk(decided.operations, prices, plan.overlap);
  const inputS = plan.local_batch * plan.accumulate * workload.input_s_per_sample / workload.input_workers;
  const waitingS = workload.input_prefetch ? Math.max(0, inputS - walked.step_s) : inputS;
  const [first, last] = prices.known_bytes;
  const outside = decided.buckets.some(({size_bytes}) => size_bytes > 0 && (size_bytes < first || size_bytes > last));
  return {
    ...walked,
    step_s: walked.step_s + waitingS,
    operations: decided.operations,
    buckets: decided.buckets,
    extrapolated: prices.extrapolated || (plan.data_devices > 1 && outside),
  };
}

/** Horovod's rule: buckets and ready times depend on each other, and are computed in turn until they stay the same. */
function decidedWhileRunning(workload, plan, prices) {
  let buckets = [];
  let schedule;
  for (let round = 0; round < 8; round++) {
    schedule = dataParallel(workload, plan, buckets, {decided: true});
    const {ready} = walk(schedule.operations, prices, plan.overlap);
    const readyS = schedule.final.map((backward) => (plan.overlap === "off" ? -1 : ready[backward]));
    const decided = horovodBuckets(workload.ready_order, plan, readyS);
    if (JSON.stringify(decided) === JSON.stringify(buckets)) break;
    buckets = decided;
  }
  return schedule;
}

/** The buckets that each cycle decides: at the first layer that is ready after it, and at the end of backward. */
function horovodBuckets(order, plan, readyS) {
  const buckets = [];
  let waiting = [];
  let tick = plan.cycle_s;
  const pack = (decided_by, held) => {
    for (const bucket of packed(waiting.map((i) => order[i]), plan.threshold_bytes)) {
      const tensors = bucket.map((i) => waiting[i]);
      buckets.push({tensors, size_bytes: sum(tensors.map((i) => order[i].size_bytes)), decided_by, held});
    }
    waiting = [];
  };
  order.forEach(({layer}, i) => {
    waiting.push(i);
    const endOfLayer = order[i + 1]?.layer !== layer;
    if (endOfLayer && readyS[i] >= tick) {
      pack(layer, false);
      tick = Math.max(tick + plan.cycle_s, readyS[i]);
    }
  });
  if (waiting.length) pack(0, true);
  return buckets;
}

/** The reviver of the JSON in which Python writes a world: infinity is the text "inf", and rows are in columns. */
function revived(key, value) {
  if (value === "inf" && key !== "name") return Infinity;
  if (!value?.columns) return value;
  const names = Object.keys(value.columns);
  const [first = []] = Object.values(value.columns);
  return first.map((_, i) => Object.fromEntries(names.map((name) => [name, value.columns[name][i]])));
}
