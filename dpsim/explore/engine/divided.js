// Steps that are divided among rank classes: Schedules that Python wrote (dpsim/explore/written.py), whose buckets are
// fused here, as dpsim/lowering/divided.py. Their operations have a rank_class, a peer and a meeting too.

/** The numbers of [difference, times in a row, ...]. */
function fromRuns(runs) {
  const values = [];
  for (let i = 0, now = 0; i < runs.length; i += 2) {
    for (let times = 0; times < runs[i + 1]; times++) values.push(now += runs[i]);
  }
  return values;
}

/** The Schedule of a plan, with its buckets. Throws where none was written. */
function divided(world, plan, costs) {
  const ofStrategy = world.schedules.filter((each) => each.strategy === plan.strategy.text);
  const alike = ofStrategy.filter((each) => each.accumulate === plan.accumulate);
  const written = alike.find((each) => each.local_batches.includes(plan.local_batch));
  if (!written) {
    const counts = unique(ofStrategy.map((each) => each.accumulate)).join(", ");
    throw new Error(`no Schedule of ${plan.strategy.text} by ${plan.accumulate} micro-batches of ` +
      `${plan.local_batch} samples was written into this page, which has some by ${counts || "no"} micro-batches`);
  }
  const operations = [...computedByClass(written, world.kinds, plan.local_batch)];
  const buckets = bucketsOfClasses(world.workload, plan, written, costs);
  return {...ended(world, plan, operations, buckets, written), buckets, stashes: written.stashes};
}

/** What the classes compute and send each other, with messages of micro-batches of so many samples. */
const computedByClass = remembered((_, batch) => String(batch), (written, kinds, batch) => {
  const names = ["kind", "layer", "micro_batch", "rank_class", "peer", "meeting", "sample_bytes", "dependencies"];
  const columns = names.map((name) => fromRuns(written[name]));
  const offsets = fromRuns(written.offsets);
  let read = 0;
  return columns[0].map((_, i) => {
    const [kind, layer, micro_batch, rank_class, peer, meeting, sampleBytes, count] = columns.map((each) => each[i]);
    const after = offsets.slice(read, read += count).map((offset) => i - offset);
    const size_bytes = Math.ceil(batch * sampleBytes - 1e-6);
    return {kind: kinds[kind], layer, bucket: -1, micro_batch, size_bytes, after, rank_class, peer, meeting};
  });
});

/** The buckets of each group of tensors that the same classes have. */
function bucketsOfClasses(workload, plan, {groups}, costs) {
  return groups.flatMap(({rank_class, copies, tensors}) => {
    const positions = fromRuns(tensors);
    const order = positions.map((i) => workload.ready_order[i]);
    const ready_s = costs.ready_s && positions.map((i) => costs.ready_s[i]);
    return bucketsAt(order, bucketStarts(order, plan, {...costs, ready_s})).map((bucket) =>
      ({...bucket, tensors: bucket.tensors.map((i) => positions[i]), rank_class, copies}));
  });
}

/** The operations with the end of each class: sums of buckets, agreement of all ranks, update, all-gathers. */
function ended({workload}, plan, operations, buckets, {agreement, stashes}) {
  const backward = stashes.map(() => new Map()); // the last one of each layer, by class
  const last = [];
  operations.forEach(({kind, layer, rank_class}, i) => {
    if (kind !== "backward") return;
    backward[rank_class].set(layer, i);
    last[rank_class] = i;
  });
  const micro_batch = plan.accumulate - 1;
  const several = plan.data_devices > 1;
  const sharded = several && plan.strategy.sharded;
  stashes.forEach((_, rank_class) => {
    const add = (kind, after, {bucket = -1, size_bytes = 0, meeting = -1} = {}) => operations.push(
      {kind, layer: -1, bucket, micro_batch, size_bytes, after, rank_class, peer: -1, meeting}) - 1;
    const held = several ? bucketsOf(buckets, rank_class).map((bucket) => {
      const {tensors, size_bytes} = buckets[bucket];
      const after = unique(tensors.map((i) => backward[rank_class].get(workload.ready_order[i].layer)));
      return {bucket, size_bytes, after, final: Math.max(...after)};
    }).sort((a, b) => a.final - b.final) : [];
    const kind = plan.strategy.sharded ? "reduce-scatter" : "allreduce";
    const summed = held.map(({after, bucket, size_bytes}) => add(kind, after, {bucket, size_bytes}));
    const awaited = summed.length ? summed : [last[rank_class]];
    const agreed = add("synchronise", awaited, {size_bytes: FINITE_BYTES, meeting: agreement});
    const update = add("update", [...awaited, agreed]);
    if (sharded) for (const {bucket, size_bytes} of held) add("all-gather", [update], {bucket, size_bytes});
  });
  return {operations, sharded, gradient_slots: 0, parameter_slots: 0};
}

/** The buckets of a class, by number. */
const bucketsOf = (buckets, rankClass) => range(0, buckets.length).filter((k) => {
  const {rank_class = 0, copies = 1} = buckets[k];
  return rank_class <= rankClass && rankClass < rank_class + copies;
});

/** The layout of so many neighbours of a layout, as dpsim/collective.py. */
function groupLayout(layout, devices) {
  const [nodes, ofANode] = nodeCounts(layout, devices);
  if (!layout || nodes * ofANode === devices) return layout;
  return devices <= ofANode ? `1x${devices}` : `${Math.floor(devices / ofANode)}x${ofANode}`;
}

/** The layout of devices that stand so far apart in a layout. */
function spreadLayout(layout, apart) {
  if (!layout || apart === 1) return layout;
  const [nodes, ofANode] = nodeCounts(layout, 1);
  return ofANode % apart ? `${Math.floor(nodes * ofANode / apart)}x1` : `${nodes}x${ofANode / apart}`;
}
