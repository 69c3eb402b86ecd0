// The interval of a step and of a speedup, as dpsim/model/interval.py: the schedule is priced again with each
// uncertainty one standard error up and one down.

/** {low_s, high_s, shifts}: `shifts` of each uncertainty are the changes of the step's logarithm, [up, down]. */
function interval(world, plan, schedule, step) {
  const {workload, machine, constants} = world;
  if (!(step > 0)) return {low_s: step, high_s: step, shifts: {}};
  const shifts = {}, assumed = machine.assumed.includes("contention");
  for (const [name, error] of Object.entries(uncertainty(world, plan, schedule))) {
    shifts[name] = [Math.exp(error), Math.exp(-error)].map((factor) => {
      if (!error) return 0;
      const toEnd = assumed && name === "overlapped";
      const of = toEnd ? constants.CONTENTION_ENDS[factor < 1 ? 1 : 0] / machine.contention : factor;
      const factors = {...EXACT, ...factorsOf(machine, constants, name, of)};
      const shift = Math.log(Math.max(price(world, plan, schedule, factors).step_s, 1e-300) / step);
      return toEnd ? shift / constants.DEVIATIONS : shift;
    });
  }
  const model = workload.emulated_compute
    ? Math.hypot(constants.EMULATED_MODEL_ERROR * plan.devices, constants.EMULATED_OWN_ERROR)
    : Math.hypot(constants.COMMON_MODEL_ERROR, constants.OWN_MODEL_ERROR);
  const known = workload.local_batches;
  const otherBatch = plan.local_batch < known[0] || plan.local_batch > known.at(-1);
  const {one, several, other_batch: ofOtherBatch} = machine.interval_factor;
  const width = otherBatch && ofOtherBatch !== several ? ofOtherBatch : plan.devices > 1 ? several : one;
  const widened = Object.entries(shifts).map(([name, each]) =>
    each.map((shift) => (assumed && name === "overlapped" ? shift : width * shift)));
  const [low_s, high_s] = ends(step, width * model, widened, constants.DEVIATIONS);
  return {low_s, high_s, shifts};
}

/** The ends of an interval around a value: an error, and shifts of its logarithm. */
function ends(value, error, shifts, deviations) {
  const up = Math.hypot(error, ...shifts.map((each) => Math.max(0, ...each)));
  const down = Math.hypot(error, ...shifts.map((each) => Math.max(0, ...each.map((shift) => -shift))));
  return [value * Math.exp(-deviations * down), value * Math.exp(deviations * up)];
}

/** [low, high] of the speedup of a prediction over that of one device: what is uncertain of both shifts both. */
function speedupEnds({constants}, one, several) {
  const speedup = several.samples_per_s / one.samples_per_s;
  if (several.plan.devices === 1 || !(one.step_s > 0 && several.step_s > 0)) return [speedup, speedup];
  const {OWN_MODEL_ERROR: own, DEVIATIONS: deviations} = constants;
  const none = [0, 0];
  const shared = Object.keys(several.shifts).map((name) => {
    const [first, second] = [one.shifts[name] ?? none, several.shifts[name]];
    return first.map((shift, row) => shift - second[row]);
  });
  const [alone, together] = [one.shifts.compute, several.shifts.compute];
  const apart = alone.map((shift, row) => Math.sqrt(Math.max(together[row] ** 2 - shift ** 2, 0)));
  return ends(speedup, Math.hypot(own, own, Math.max(...apart)), shared, deviations);
}

/** What an uncertainty multiplies. A slower machine makes collectives slower too, those on an emulated link by less. */
function factorsOf(machine, constants, name, factor) {
  if (name === "network") return {network: factor, overlapped: machine.overlap.length ? 1 : factor};
  if (name !== "speed") return {[name]: factor};
  const network = machine.emulated_network ? factor ** constants.EMULATED_LINK_SHARE : factor;
  return {compute: factor, network, overlapped: factor, loss: factor};
}
