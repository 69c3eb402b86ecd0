// What a step charges for its operations, as dpsim/model/prices.py: computation, collectives and overlap.

const EXACT = {compute: 1, network: 1, overlapped: 1, loss: 1, overhead: 1, fixed_share: 1};
const FREE_NETWORK = {compute: 1, network: 0, overlapped: 0, loss: 0, overhead: 0, fixed_share: 1};

/** A value of rows at a local batch: linear between the profiled ones, along the nearest segment outside. */
function atBatch(batches, values, batch) {
  if (batches.length === 1) return values[0] * (batch / batches[0]);
  const reached = batches.filter((each) => each < batch).length;
  const i = Math.min(Math.max(reached - 1, 0), batches.length - 2);
  const weight = (batch - batches[i]) / (batches[i + 1] - batches[i]);
  return values[i] * (1 - weight) + values[i + 1] * weight;
}

/** Seconds of each layer at a local batch, of the loss, and of a step beside those. */
const layerTimes = remembered(String, (workload, batch) => {
  const of = (values) => Math.max(atBatch(workload.local_batches, values, batch), 0);
  const {layers} = workload;
  const backward_s = layers.map((layer) => of(layer.backward_s));
  return {
    forward_s: layers.map((layer) => of(layer.forward_s)),
    backward_s,
    gradient_ready_s: layers.map((layer, i) => Math.min(of(layer.gradient_ready_s ?? layer.backward_s), backward_s[i])),
    overhead_s: workload.overhead_s + batch * workload.overhead_per_sample_s,
    loss_s: workload.loss_s.length ? of(workload.loss_s) : 0,
  };
});

/** Linear between known device counts, beyond them the last one's; one device has `alone` unless it is given. */
function byDevices(slowdowns, name, alone, devices) {
  const points = [...new Map([[1, alone], ...slowdowns.map((each) => [each.devices, each[name]])])];
  points.sort(([a], [b]) => a - b);
  const above = points.findIndex(([count]) => count >= devices);
  if (above < 0) return points.at(-1)[1];
  if (above === 0 || points[above][0] === devices) return points[above][1];
  const [[few, low], [many, high]] = [points[above - 1], points[above]];
  return low + (high - low) * (devices - few) / (many - few);
}

/** [factor on every compute time when so many devices compute at once, whether that is extrapolated]. */
function computeSlowdown(machine, {devices, layout}) {
  const most = Math.max(1, ...machine.compute_slowdown.map((each) => each.devices));
  const grown = Math.max(1, devices / Math.max(most, 2)) ** ((machine.loss_growth ?? 0) / Math.LN2);
  const factor = byDevices(machine.compute_slowdown, "factor", 1, devices) * grown;
  const together = !layout || machine.emulated_network ? devices : nodeCounts(layout, devices)[1];
  const shared = machine.cores ? Math.max(1, together / machine.cores) : 1;
  const beyond = devices > most && machine.loss_growth === null && (machine.compute_slowdown.length > 0 || shared > 1);
  return [shared > 1 ? Math.max(factor, shared) : factor, beyond];
}

/** How many times as long the slowest of n devices computes as the slowest of those calibrated together. */
function waitingFactor(machine, {slowest}, devices) {
  if (devices === 1 || !slowest) return 1;
  const calibrated = Math.min(devices, Math.max(1, ...machine.compute_slowdown.map((each) => each.devices)));
  const {expected, growth} = slowest;
  const most = expected.length;
  const ofSlowest = (n) => expected[Math.min(n, most) - 1] + growth * Math.log(Math.max(1, n / most));
  return devices === calibrated ? 1 : Math.max(1, ofSlowest(devices) / ofSlowest(calibrated));
}

/** The part of all parameters that each class has. */
function sharesOfParameters({buckets, stashes}) {
  if (!stashes) return [1];
  const bytes = (some) => sum(some.map((bucket) => bucket.size_bytes));
  const total = Math.max(bytes(buckets), 1);
  return stashes.map((_, own) => bytes(bucketsOf(buckets, own).map((k) => buckets[k])) / total);
}

/** The prices of a schedule, each part times its factor. */
function pricesOf(world, plan, schedule, factors) {
  const {workload, machine} = world;
  const {devices, data_devices, strategy} = plan;
  const several = strategy.classes > 1;
  const samples = plan.local_batch;
  const [shared, beyond] = computeSlowdown(machine, plan);
  const slowdown = shared * factors.compute;
  const waits = waitingFactor(machine, workload, devices);
  let ofLayers = slowdown * waits;
  if (machine.fixed_share && workload.local_batches.length === 1) {
    const share = Math.min(1, machine.fixed_share * factors.fixed_share);
    ofLayers *= share * workload.local_batches[0] / samples + 1 - share;
  }
  if (plan.accumulate > 1 && !workload.emulated_compute) ofLayers *= workload.accumulation_factor;
  const times = layerTimes(workload, samples);
  const layers = workload.layers.map((layer, i) => ({
    forward_s: times.forward_s[i] * ofLayers,
    backward_s: times.backward_s[i] * ofLayers,
    gradient_ready_s: times.gradient_ready_s[i] * ofLayers,
    launch_s: layer.launch_s * factors.compute,
    launch_backward_s: layer.launch_backward_s * factors.compute,
    announces: layer.tensors > 0,
  }));
  const {collective} = plan;
  const idle = idleCurve(machine, collective);
  const beside = data_devices > 1 && (plan.overlap === "poll" || plan.overlap === "thread");
  const [overlapped, pollS] = beside ? overlappedCurve(machine, collective, plan.overlap) : [idle, 0];
  let [gather, overlappedGather, update_s] = [idle, overlapped, workload.update_s * slowdown];
  if (schedule.sharded) {
    const gathers = {...collective, kind: "all-gather"};
    gather = overlappedGather = idleCurve(machine, gathers);
    if (beside) [overlappedGather] = overlappedCurve(machine, gathers, plan.overlap);
    update_s /= data_devices;
  }
  let sums = idle;
  if (workload.own_allreduce_bytes.length && data_devices > 1) {
    sums = idleCurve(machine, whole(collective));
  } else if ((plan.batch_norm !== "local" || schedule.sharded) && data_devices > 1) {
    sums = sumsCurve(machine, plan.batch_norm === "local" ? collective : whole(collective));
  }
  let [agreement, joining] = [idle, idle];
  if (several) agreement = sumsCurve(machine, {...whole(collective), devices, layout: plan.layout});
  if (several && strategy.parts > 1) joining = idleCurve(machine, priced(machine, plan.joining));
  const copies = copyCurve(machine, collective);
  const overheadOfEach = devices > 1 ? (machine.collective_overhead_s ?? 0) * factors.overhead : 0;
  const charged = (curve, slots, scales) => {
    const rows = curve.rows.map((row, r) => row.map((seconds, i) => {
      const copy = slots && copies && r === 0 ? at(copies, 0, curve.sizes[i] / data_devices) : 0;
      return (seconds + copy) * scales[r] + (r === 0 ? overheadOfEach : 0);
    }));
    return {sizes: curve.sizes, rows};
  };
  const {gradient_slots, parameter_slots} = schedule;
  const [network, overlap] = [[factors.network], [factors.overlapped, factors.loss]];
  const addedS = byDevices(machine.compute_slowdown, "added_s", 0, devices);
  const curves = [idle, overlapped, gather, ...(strategy.gathers ? [overlappedGather] : [])];
  const messages = strategy.stages > 1 ? messagesOf(machine, plan, schedule) : [];
  return {
    layers,
    overhead_s: (times.overhead_s * slowdown + addedS * factors.compute) * waits,
    poll_s: pollS * factors.loss,
    stages: roundsOf(collective),
    loss_s: times.loss_s * slowdown * waits,
    update_s: sharesOfParameters(schedule).map((share) => update_s * waits * share),
    idle: charged(idle, gradient_slots, network),
    overlapped: charged(overlapped, gradient_slots, overlap),
    gather: charged(gather, parameter_slots, network),
    overlapped_gather: charged(overlappedGather, parameter_slots, overlap),
    sums: charged(sums, 0, network),
    agreement: charged(agreement, 0, network),
    joining: charged(delayed(joining, machine.wake_s), 0, network),
    messages: messages.map((each) => each && {...each, seconds: each.seconds * factors.network}),
    known_bytes: [Math.max(...curves.map((curve) => curve.first)), Math.min(...curves.map((curve) => curve.last))],
    extrapolated: beyond || messages.some((each) => each?.extrapolated) ||
      samples < workload.local_batches[0] || samples > workload.local_batches.at(-1),
  };
}

/** Of each send {seconds, copied: its receiver does the work, extrapolated}, as dpsim/model/messages.py. */
function messagesOf(machine, plan, {operations}) {
  return operations.map(({kind, peer, rank_class, size_bytes}) => {
    if (kind !== "send") return undefined;
    const senders = sendersOf(plan, rank_class, operations[peer].rank_class);
    const across = senders > 0;
    const curve = sendCurve(machine, plan.layout ? across ? "2x1" : "1x2" : "");
    return {
      seconds: at(curve, 0, size_bytes * Math.max(senders, 1)),
      copied: !(across || machine.emulated_network) && machine.cores > 0,
      extrapolated: size_bytes < curve.first || size_bytes > curve.last,
    };
  });
}

/** How many ranks of a node send to another one when each of a stage sends to its peer; 0 in a flat layout. */
const sendersOf = remembered(sendersName, (plan, sender, receiver) => {
  if (!plan.layout) return 0;
  const {data_devices, strategy: {parts}} = plan;
  const [, ofANode] = nodeCounts(plan.layout, plan.devices);
  const first = (own) => Math.floor(own / parts) * data_devices * parts + own % parts;
  const apart = first(receiver) - first(sender);
  const begin = Math.floor(sender / parts) * data_devices * parts;
  const leaving = new Map();
  let most = 0;
  for (let rank = begin; rank < begin + data_devices * parts; rank++) {
    const node = Math.floor(rank / ofANode);
    if (node === Math.floor((rank + apart) / ofANode)) continue;
    leaving.set(node, (leaving.get(node) ?? 0) + 1);
    most = Math.max(most, leaving.get(node));
  }
  return most;
});

function sendersName(sender, receiver) {
  return `${sender},${receiver}`;
}
