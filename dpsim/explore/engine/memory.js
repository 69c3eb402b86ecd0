// What a plan needs of each device's memory, as dpsim/model/memory.py: bytes by part, of the class that needs most.

const MEMORY_PARTS = ["parameters", "gradients", "optimizer_state", "activations", "communication_buffers"];
const SHARD_LINE = 16; // elements between the bounds of shards

/** Bytes by part and in `total`; `activations` is null where the workload states none. */
function memory(world, plan, schedule) {
  const classes = (schedule.stashes ?? [1]).map((_, own) => memoryOfClass(world, plan, schedule, own));
  const totals = classes.map((parts) => sum(MEMORY_PARTS.map((part) => parts[part] ?? 0)));
  const most = totals.indexOf(Math.max(...totals));
  return {...classes[most], total: totals[most]};
}

function memoryOfClass({workload}, plan, schedule, own) {
  const buckets = bucketsOf(schedule.buckets, own).map((k) => schedule.buckets[k]);
  const sizes = buckets.map((bucket) => bucket.size_bytes);
  const [whole, largest] = [sum(sizes), Math.max(0, ...sizes)];
  const shards = sum(buckets.map(({tensors, size_bytes}) => {
    const {item_bytes} = workload.ready_order[tensors[0]];
    return Math.ceil(size_bytes / item_bytes / (SHARD_LINE * plan.data_devices)) * SHARD_LINE * item_bytes;
  }));
  const inSlots = (slots) => {
    if (!slots) return whole;
    const ofSlot = (slot) => Math.max(...sizes.filter((_, k) => k % slots === slot));
    return shards + sum(range(0, Math.min(slots, sizes.length)).map(ofSlot));
  };
  let buffers = plan.data_devices > 1 && whole ? largest : 0;
  if (buffers && plan.rule.while_running) {
    buffers = Math.max(buffers, Math.floor(Math.min(plan.threshold_bytes, whole)));
  } else if (buffers && byDdp(workload, schedule)) {
    buffers = workload.gradient_memory === "buckets" ? 0 : whole;
  }
  const partialSums = knowsRuntime(workload) ? Math.ceil(Math.log2(plan.accumulate)) : 0;
  const gradients = inSlots(schedule.gradient_slots) + partialSums * whole;
  return {
    parameters: inSlots(schedule.parameter_slots) + workload.state_bytes,
    gradients,
    optimizer_state: workload.optimizer_slots * (schedule.sharded ? shards : whole),
    activations: activations(workload, plan, schedule, own, gradients + buffers),
    communication_buffers: buffers,
  };
}

/** Whether a workload knows what dpsim's own runtime allocates for its layers. */
const knowsRuntime = ({layers}) => layers.some((layer) => layer.work_bytes_per_sample);

/** Whether DDP trains a script whose steps were weighed. */
const byDdp = ({gradient_memory}, {stashes = [1], sharded}) => gradient_memory && stashes.length === 1 && !sharded;

/** What layers keep until backward, and what a script's step works in beside its gradients. */
function keptOf(workload, plan, schedule, layers, samples, backwardBytes) {
  const kept = layers.map((layer) => layer.work_bytes + samples * layer.activation_bytes_per_sample);
  if (schedule.sharded && (schedule.stashes ?? [1]).length === 1 && plan.accumulate === 1) {
    return Math.max(sum(kept) - (workload.gradient_memory === "released" ? backwardBytes : 0), 0);
  }
  if (!byDdp(workload, schedule)) return sum(kept);
  if (plan.accumulate > 1) return sum(kept) + Math.max(0, ...workload.ready_order.map(({size_bytes}) => size_bytes));
  const gradients = layers.map(() => 0);
  for (const {layer, size_bytes} of workload.gradient_memory === "released" ? workload.ready_order : []) {
    gradients[layer] += size_bytes;
  }
  let [most, beside] = [0, 0];
  kept.forEach((bytes, number) => {
    beside += bytes - gradients[number];
    most = Math.max(most, beside);
  });
  return most;
}

/** What the micro-batches in flight take, with what is received for them; or an update, where that is more. */
function activations(workload, plan, schedule, own, backwardBytes) {
  const {operations, stashes = [1]} = schedule;
  const ofClass = operations.filter(({rank_class = 0}) => rank_class === own);
  const forwards = unique(ofClass.filter(({kind}) => kind === "forward").map(({layer}) => layer));
  const layers = forwards.sort((a, b) => a - b).map((layer) => workload.layers[layer]);
  const [samples, stash] = [plan.local_batch, stashes[own]];
  let taken;
  if (knowsRuntime(workload)) {
    taken = sum(layers.map((layer) => layer.work_bytes + samples * layer.work_bytes_per_sample));
  } else if (workload.layers.some((layer) => layer.activation_bytes_per_sample)) {
    taken = keptOf(workload, plan, schedule, layers, samples, backwardBytes);
  } else return null;
  const received = new Map(); // the largest message of each class
  for (const {kind, peer, size_bytes} of ofClass) {
    if (kind !== "receive") continue;
    const sender = operations[peer].rank_class;
    received.set(sender, Math.max(received.get(sender) ?? 0, size_bytes));
  }
  const from = (earlier) => sum([...received].filter(([sender]) => sender < own === earlier).map(([, size]) => size));
  const messages = stash * from(true) + from(false);
  const updating = stashes.length === 1 ? Math.floor(workload.update_bytes / (schedule.sharded ? plan.data_devices : 1)) : 0;
  if (!ofClass.some(({kind}) => kind === "recompute")) return Math.max(Math.ceil(stash * taken) + messages, updating);
  const kept = from(true) + samples * layers.at(-1).output_bytes_per_sample;
  return Math.ceil(taken + stash * kept) + messages;
}
