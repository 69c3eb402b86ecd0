// A workload and a plan -> the operations of one step, as dpsim/lowering: data parallelism and ZeRO-1, 2 and 3. The
// steps of other strategies are divided among rank classes (divided.js).
//
// An operation is {kind, layer, bucket, micro_batch, size_bytes, after}: `after` are the operations before it that it
// waits for. Operations of the compute lane, and collectives of buckets, run in the order of the array.

const QUEUED = new Set(["allreduce", "reduce-scatter", "all-gather"]);
const FINITE_BYTES = 8; // what a rank sends to each other one to agree that all numbers are finite

/** The schedule of a plan: operations, buckets, and how many buckets have memory at once where a rank keeps shards. */
function lower(world, plan, costs) {
  const {workload} = world;
  if (plan.strategy.classes > 1) return divided(world, plan, costs);
  const start = bucketStarts(workload.ready_order, plan, costs);
  const buckets = bucketsAt(workload.ready_order, start);
  const {name, sharded} = plan.strategy;
  if (plan.devices === 1 || !sharded) return dataParallel(workload, plan, buckets);
  if (name === "zero1") return dataParallel(workload, plan, buckets, {sharded: true});
  return name === "zero2" ? zero2(workload, plan, buckets) : zero3(workload, plan, start);
}

/** Where the buckets of tensors in ready order begin. On one device a rule that needs costs makes one bucket. */
function bucketStarts(tensors, plan, costs) {
  const rule = plan.rule;
  let name = plan.fusion_rule;
  if (rule.while_running) name = "per-tensor";
  else if (rule.needs_costs && plan.data_devices === 1) name = "one";
  const isDefault = plan.fusion_threshold_bytes === null;
  return FUSION_RULES[name](tensors, plan.threshold_bytes, isDefault, costs);
}

/** The buckets of tensors that begin at `start`: {tensors, size_bytes}, with positions among the tensors. */
function bucketsAt(order, start) {
  return start.slice(1).map((stop, k) => {
    const tensors = range(start[k], stop);
    return {tensors, size_bytes: sum(tensors.map((i) => order[i].size_bytes))};
  });
}

/** Seconds from the start of a backward until each tensor is final, in ready order. */
function readyTimes(workload, localBatch) {
  const {backward_s, gradient_ready_s} = layerTimes(workload, localBatch);
  const begin = Array(backward_s.length);
  let now = 0;
  for (let layer = backward_s.length - 1; layer >= 0; layer--) {
    now += backward_s[layer];
    begin[layer] = now - backward_s[layer]; // rounded as in Python: buckets may hang on the last bit
  }
  let latest = 0;
  return workload.ready_order.map(({layer}) => (latest = Math.max(latest, begin[layer] + gradient_ready_s[layer])));
}

/** The operations of all micro-batches; the last backward of each layer, and of each tensor's layer in ready order. */
const computation = remembered(whatIsComputed, (workload, plan) => {
  const operations = [];
  const synchronised = plan.batch_norm === "global" && plan.devices > 1;
  const add = (kind, layer, micro_batch, after, sumBytes = 0) => {
    operations.push({kind, layer, bucket: -1, micro_batch, size_bytes: 0, after});
    if (!sumBytes) return operations.length - 1;
    const behind = [operations.length - 1];
    operations.push({kind: "synchronise", layer, bucket: -1, micro_batch, size_bytes: sumBytes, after: behind});
    return operations.length - 1;
  };
  const {layers} = workload;
  const readers = layers.map(() => []);
  layers.forEach((layer, number) => layer.inputs.forEach((each) => readers[each].push(number)));
  const backward = Array(layers.length);
  let begin = add("step overhead", -1, 0, []);
  for (let micro = 0; micro < plan.accumulate; micro++) {
    const outputs = [];
    layers.forEach((layer, number) => {
      const after = layer.inputs.length ? layer.inputs.map((each) => outputs[each]) : [begin];
      outputs.push(add("forward", number, micro, after, synchronised ? layer.statistics_bytes[0] : 0));
    });
    let loss = add("loss", -1, micro, outputs.filter((_, number) => !readers[number].length));
    if (plan.devices > 1 && micro === plan.accumulate - 1) {
      for (const size_bytes of workload.own_allreduce_bytes) {
        operations.push({kind: "synchronise", layer: -1, bucket: -1, micro_batch: micro, size_bytes, after: [loss]});
        loss = operations.length - 1;
      }
    }
    const gradients = Array(layers.length);
    for (let number = layers.length - 1; number >= 0; number--) {
      const after = readers[number].length ? readers[number].map((each) => gradients[each]) : [loss];
      backward[number] = operations.length;
      gradients[number] = add("backward", number, micro, after, synchronised ? layers[number].statistics_bytes[1] : 0);
    }
    begin = operations.length - 1;
  }
  return {operations, backward, final: workload.ready_order.map(({layer}) => backward[layer])};
});

function whatIsComputed({accumulate, batch_norm, devices}) {
  return `${accumulate},${batch_norm},${devices > 1}`;
}

/**
 * Data parallelism: the computation, an allreduce of each bucket after the backwards of its tensors, the update.
 *
 * Sharded, it is ZeRO-1: reduce-scatters, the agreement that all numbers are finite, the update, all-gathers. Under
 * Horovod's rule nothing is sent before buckets are `decided`: such a bucket waits for the backward of the layer
 * `decided_by`, and a `held` one starts only when something waits for it.
 */
function dataParallel(workload, plan, buckets, {sharded = false, decided = !plan.rule.while_running} = {}) {
  const {operations: computed, backward, final} = computation(workload, plan);
  const operations = [...computed];
  const before = operations.length;
  const micro_batch = plan.accumulate - 1;
  const add = (kind, after, bucket = -1, size_bytes = 0, held = false) =>
    operations.push({kind, layer: -1, bucket, micro_batch, size_bytes, after, held}) - 1;
  const sent = decided && plan.devices > 1 ? buckets : [];
  const kind = sharded ? "reduce-scatter" : "allreduce";
  sent.forEach((bucket, k) => {
    const after = "decided_by" in bucket ? [backward[bucket.decided_by]] : unique(bucket.tensors.map((i) => final[i]));
    add(kind, after, k, bucket.size_bytes, bucket.held);
  });
  const last = sent.length ? range(before, operations.length) : [before - 1];
  if (sharded) add("synchronise", last, -1, FINITE_BYTES);
  const update = add("update", sharded ? [...last, operations.length - 1] : last);
  if (sharded) sent.forEach((bucket, k) => add("all-gather", [update], k, bucket.size_bytes));
  return {operations, buckets, final, sharded, gradient_slots: 0, parameter_slots: 0};
}

/** ZeRO-2: a bucket's first backward waits until the bucket that had its memory before has been reduce-scattered. */
function zero2(workload, plan, buckets) {
  const {final} = computation(workload, plan);
  const first = buckets.map(({tensors}) => final[tensors[0]]);
  const last = buckets.map(({tensors}) => final[tensors.at(-1)]);
  const apart = (slots) => range(slots, buckets.length).every((k) => last[k - slots] < first[k]);
  const slots = plan.accumulate === 1 ? range(plan.strategy.buckets, buckets.length).find(apart) : undefined;
  if (slots === undefined) return dataParallel(workload, plan, buckets, {sharded: true});
  return interleaved(workload, plan, buckets, {gradient_slots: slots, gathers_after: true});
}

/** ZeRO-3 (FSDP): units of whole layers are gathered before they are needed, and reduce-scattered in backward. */
function zero3(workload, plan, start) {
  const units = bucketsAt(workload.ready_order, wholeLayers(workload, start));
  const {prefetch, reshard} = plan.strategy;
  const slots = prefetch + 1 < units.length ? prefetch + 1 : 0;
  const parameter_slots = reshard ? slots : 0;
  return interleaved(workload, plan, units, {
    gradient_slots: plan.accumulate === 1 ? slots : 0,
    parameter_slots,
    gathers: gathersOf(usesOf(workload, plan, units), parameter_slots || units.length, prefetch),
  });
}

/** Starts of buckets, each moved to the next layer: a bucket ends with the layer that it ends in. */
function wholeLayers(workload, start) {
  const order = workload.ready_order;
  const border = (i) => i === 0 || i === order.length || order[i].layer !== order[i - 1].layer;
  return unique(start.map((i) => {
    while (!border(i)) i++;
    return i;
  }));
}

/** The uses of units, in order: neighbouring computations of one unit, by their first and last row. */
function usesOf(workload, plan, units) {
  const unitOf = new Map();
  units.forEach(({tensors}, unit) => tensors.forEach((i) => unitOf.set(workload.ready_order[i].layer, unit)));
  const uses = [];
  computation(workload, plan).operations.forEach(({kind, layer, micro_batch}, row) => {
    if ((kind !== "forward" && kind !== "backward") || !unitOf.has(layer)) return;
    const unit = unitOf.get(layer);
    if (uses.length && uses.at(-1).unit === unit) uses.at(-1).last = row;
    else uses.push({unit, first: row, last: row, micro_batch});
  });
  return uses;
}

/** The gathers of the uses whose unit is not in its slot then: `prefetch` uses before, behind the unit's last use. */
function gathersOf(uses, slots, prefetch) {
  const gathers = [];
  const resident = new Map();
  const used = new Map();
  uses.forEach((use, place) => {
    const begin = Math.max(place - prefetch, (used.get(use.unit) ?? -1) + 1);
    used.set(use.unit, place);
    if (resident.get(use.unit % slots) !== use.unit) {
      const after = begin > 0 ? uses[begin - 1].last : 0;
      gathers.push({bucket: use.unit, before: uses[Math.max(begin, 0)].first, after, needed_by: use.first});
    }
    resident.set(use.unit % slots, use.unit);
  });
  return gathers;
}

/** A step whose reduce-scatters and all-gathers stand among the computation. */
function interleaved(workload, plan, buckets, options) {
  const {gradient_slots = 0, parameter_slots = 0, gathers = [], gathers_after = false} = options;
  const rows = computation(workload, plan);
  const complete = new Map();
  const written = new Map();
  buckets.forEach(({tensors}, k) => {
    let row = rows.final[tensors.at(-1)];
    while (rows.operations[row + 1]?.kind === "synchronise") row++;
    complete.set(row, [...(complete.get(row) ?? []), k]);
    if (!gradient_slots || k < gradient_slots) return;
    const first = rows.final[tensors[0]];
    written.set(first, [...(written.get(first) ?? []), k - gradient_slots]);
  });
  const operations = [];
  const add = (operation) => operations.push({layer: -1, bucket: -1, size_bytes: 0, ...operation}) - 1;
  const number = [];
  const summed = [];
  const waits = new Map();
  let queued = 0;
  rows.operations.forEach((operation, row) => {
    const {micro_batch} = operation;
    for (; gathers[queued]?.before === row; queued++) {
      const {bucket, after, needed_by} = gathers[queued];
      const {size_bytes} = buckets[bucket];
      waits.set(needed_by, add({kind: "all-gather", bucket, micro_batch, size_bytes, after: [number[after]]}));
    }
    const after = operation.after.map((earlier) => number[earlier]);
    for (const bucket of written.get(row) ?? []) after.push(summed[bucket]);
    if (waits.has(row)) after.push(waits.get(row));
    number.push(add({...operation, after}));
    for (const bucket of complete.get(row) ?? []) {
      const {tensors, size_bytes} = buckets[bucket];
      const backwards = unique(tensors.map((i) => number[rows.final[i]]));
      summed.push(add({kind: "reduce-scatter", bucket, micro_batch, size_bytes, after: backwards}));
    }
  });
  const micro_batch = plan.accumulate - 1;
  const awaited = summed.length ? summed : [operations.length - 1];
  const agreed = add({kind: "synchronise", micro_batch, size_bytes: FINITE_BYTES, after: awaited});
  const update = add({kind: "update", micro_batch, after: [...awaited, agreed]});
  if (gathers_after) {
    buckets.forEach(({size_bytes}, bucket) =>
      add({kind: "all-gather", bucket, micro_batch, size_bytes, after: [update]}));
  }
  return {operations, buckets, sharded: true, gradient_slots, parameter_slots};
}

const range = (start, stop) => Array.from({length: Math.max(stop - start, 0)}, (_, i) => start + i);
const sum = (values) => values.reduce((total, value) => total + value, 0);
const unique = (values) => [...new Set(values)];
