// How uncertain the prices of a plan are, as dpsim/model/uncertainty.py: relative standard errors, independent of
// each other. What nobody stated is assumed (`constants`).

function uncertainty({workload, machine, constants}, plan, schedule) {
  const {devices, collective, strategy} = plan;
  const emulated = workload.emulated_compute;
  const speed = emulated ? 0 : machine.relative_uncertainty ?? constants.ASSUMED_SPEED;
  let compute = emulated ? 0 : ofLayers(workload, machine, constants, plan.local_batch);
  const fixed_share = ofFixedShare(workload, machine, plan.local_batch);
  if (devices === 1) return {speed, compute, fixed_share};
  compute = Math.hypot(compute, ofSlowdown(machine, constants, plan, emulated));
  let [network, overlapped, loss] = [0, 0, 0];
  if (plan.data_devices > 1) {
    network = ofNetwork(machine, constants, collective) +
      constants.SIZE_STEP * doublingsOutside(machine, collective, schedule.buckets);
    const gather = {...collective, kind: "all-gather"};
    if (schedule.sharded) network = Math.max(network, ofNetwork(machine, constants, gather));
    if (plan.overlap === "poll" || plan.overlap === "thread") {
      [overlapped, loss] = ofOverlap(machine, constants, collective, plan.overlap);
      if (strategy.gathers) {
        const beside = ofOverlap(machine, constants, gather, plan.overlap);
        [overlapped, loss] = [Math.max(overlapped, beside[0]), Math.max(loss, beside[1])];
      }
    }
  }
  if (strategy.classes > 1) {
    network = Math.max(network, ...neighbours(plan).map((each) => ofMessages(machine, constants, each)));
  }
  const ofOverhead = machine.collective_overhead_uncertainty ?? constants.ASSUMED_OVERHEAD;
  const overhead = machine.collective_overhead_s ? ofOverhead : 0;
  return {speed, compute, network, overlapped, loss, overhead, fixed_share};
}

/** Of layer times; more for every doubling (or halving) outside the profile. */
function ofLayers(workload, machine, constants, batch) {
  const own = workload.relative_uncertainty ?? constants.ASSUMED_COMPUTE;
  if (ofFixedShare(workload, machine, batch)) return own;
  const outside = Math.max(workload.local_batches[0] / batch, batch / workload.local_batches.at(-1), 1);
  return own + constants.BATCH_STEP * Math.log2(outside);
}

/** Of the share of a step that no batch changes, where layer times are known at one batch. */
function ofFixedShare(workload, machine, batch) {
  const [known, another] = workload.local_batches;
  const ofOneBatch = machine.fixed_share && another === undefined && known !== batch && !workload.emulated_compute;
  return (ofOneBatch && machine.fixed_share_uncertainty) || 0;
}

/** Of the compute slowdown; more for every doubling away from the nearest calibrated number of devices. */
function ofSlowdown(machine, constants, plan, emulated) {
  const nearest = least(machine.compute_slowdown, (each) => Math.abs(Math.log2(each.devices / plan.devices)));
  if (emulated) return nearest ? nearest.half_width / constants.NORMAL_95 : 0;
  if (!nearest) {
    const [factor] = computeSlowdown(machine, plan);
    return constants.ASSUMED_SLOWDOWN + constants.DEVICES_STEP * Math.log2(Math.max(1, factor));
  }
  const own = nearest.half_width > 0 ? nearest.half_width / constants.NORMAL_95 : constants.ASSUMED_SLOWDOWN;
  const away = Math.abs(Math.log2(plan.devices / nearest.devices));
  if (machine.loss_growth_uncertainty !== null) {
    const {known_devices: known} = machine;
    const alone = known.length && !known.includes(1) && machine.assumed.includes("compute_slowdown");
    const doublings = alone ? Math.min(...known.map((each) => Math.abs(Math.log2(plan.devices / each)))) : away;
    return Math.hypot(alone ? 0 : own, machine.loss_growth_uncertainty * doublings);
  }
  return own + constants.DEVICES_STEP * away;
}

/** The layouts that two devices of a plan can have. */
function neighbours({layout, devices}) {
  if (!layout) return devices > 1 ? [""] : [];
  const [nodes, ofANode] = nodeCounts(layout, devices);
  return [...(ofANode > 1 ? ["1x2"] : []), ...(nodes > 1 ? ["2x1"] : [])];
}

/** Of a message between two devices; what an emulated link does with one is exact. */
function ofMessages(machine, constants, layout) {
  const table = sendTable(machine, layout);
  if (table) return stated(machine, table);
  return emulatedLink(machine, layout) ? 0 : machine.link?.relative_uncertainty ?? constants.ASSUMED_LINK;
}

/** Of a collective's cost inside its table, or by what stands for a table that the machine does not have. */
function ofNetwork(machine, constants, collective) {
  const table = tableFor(tablesOf(machine, collective.kind), collective);
  if (table) return stated(machine, table) + (table.wire_dtype !== "float32" ? constants.SIZE_STEP : 0);
  const {scaled} = idleCurve(machine, collective);
  if (scaled) return scaled.error;
  if (collective.kind !== "allreduce") {
    return constants.ASSUMED_TABLE + ofNetwork(machine, constants, whole(collective));
  }
  const {link} = machine;
  if (link && link.relative_uncertainty !== null) return link.relative_uncertainty;
  if (!link?.fitted) return constants.ASSUMED_LINK;
  const away = machine.allreduce.map((each) => Math.abs(Math.log2(collective.devices / each.devices)));
  const levels = new Set(machine.allreduce.map((each) => levelOf(machine, each.layout)));
  const known = machine.link_in_node && collective.layout;
  const unmeasured = known ? 0 : layoutError(machine, levelOf(machine, collective.layout), levels);
  const fit = Math.max(constants.ASSUMED_FIT, link.median_residual);
  return Math.hypot(fit + constants.DEVICES_STEP * (away.length ? Math.min(...away) : 0), unmeasured);
}

/** By how many doublings the buckets lie outside the tables, on average by their cost. */
function doublingsOutside(machine, collective, buckets) {
  const curve = idleCurve(machine, collective);
  let {first, last} = curve;
  if (curve.scaled) {
    const sizes = curve.scaled.tables.map((table) => sizesOnTheWire(machine, table));
    first = Math.max(...sizes.map((each) => each[0]));
    last = Math.min(...sizes.map((each) => each.at(-1)));
  }
  const sizes = buckets.map((bucket) => bucket.size_bytes).filter((size) => size > 0);
  if (!sizes.length || !(first <= last)) return 0;
  const doublings = sizes.map((size) => Math.log2(Math.max(1, first / size, size / Math.max(last, 1))));
  const costs = sizes.map((size) => at(curve, 0, size));
  const total = sum(costs);
  if (!(total > 0)) return sum(doublings) / doublings.length;
  return sum(doublings.map((each, i) => each * costs[i])) / total;
}

/** [of the times beside computation, of the compute time lost], by the nearest table of the mechanism. */
function ofOverlap(machine, constants, collective, overlap) {
  const tables = machine.overlap.filter((each) => each.overlap === overlap && each.algorithm === collective.algorithm);
  if (!tables.length) {
    const {computation_taken: taken, computation_taken_uncertainty: ofTaken} = machine;
    const ofLoss = taken && ofTaken !== null ? ofTaken / taken : constants.ASSUMED_LOSS;
    return [machine.contention_uncertainty ?? constants.ASSUMED_OVERLAP, ofLoss];
  }
  const doublings = (table) => Math.abs(Math.log2(table.devices / collective.devices));
  const nearest = least(tables, (table) => table.kind !== collective.kind, doublings);
  const otherKind = nearest.kind !== collective.kind ? constants.ASSUMED_TABLE : 0;
  const away = constants.DEVICES_STEP * doublings(nearest) + otherKind;
  return [(nearest.relative_uncertainty ?? constants.ASSUMED_OVERLAP) + away,
    (nearest.loss_relative_uncertainty ?? constants.ASSUMED_LOSS) + away];
}
