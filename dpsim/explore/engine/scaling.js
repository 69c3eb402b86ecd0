// Prices on devices without a table, as dpsim/model/scaling.py: the nearest tables, scaled by the rounds and bytes
// that the algorithm counts.

/** Whether devices are inside one node or across several: "inside", "across" or "unknown". */
function levelOf(machine, layout) {
  if (layout) return nodeCounts(layout, 1)[0] === 1 ? "inside" : "across";
  return machine.emulated_network ? "across" : machine.cores ? "inside" : "unknown";
}

/** The level of a collective's devices: flat ones of which nothing is known fill nodes one after the other. */
function levelOfCollective(machine, {layout, devices}) {
  const level = levelOf(machine, layout);
  return level === "unknown" && devices <= machine.devices_a_node ? "inside" : level;
}

const STANDS_IN = {
  inside: ["inside", "unknown"], across: ["across", "unknown"], unknown: ["unknown", "across", "inside"],
};
const stated = (machine, table) => table.relative_uncertainty ?? machine.constants.ASSUMED_TABLE;

/** The tables that stand for a collective without its own, and the standard error of scaling them. */
function nearestTables(machine, tables, collective) {
  const {constants} = machine;
  const asked = levelOfCollective(machine, collective);
  let alike = tables.filter((each) =>
    each.devices > 1 && each.kind === collective.kind && each.algorithm === collective.algorithm);
  const levels = new Set(alike.map((each) => levelOf(machine, each.layout)));
  const taken = STANDS_IN[asked].find((each) => levels.has(each));
  if (!taken) return undefined;
  alike = alike.filter((each) => levelOf(machine, each.layout) === taken);
  if (taken !== "inside") {
    const [, ofANode] = nodeCounts(collective.layout, 1);
    const away = (each) => Math.abs(Math.log2(nodeCounts(each.layout, 1)[1] / ofANode));
    const nearest = Math.min(...alike.map(away));
    alike = alike.filter((each) => away(each) === nearest);
  }
  const sameDtype = alike.filter((each) => each.wire_dtype === "float32");
  alike = sameDtype.length ? sameDtype : alike;
  const below = least(alike.filter((each) => each.devices <= collective.devices), (each) => -each.devices);
  const above = least(alike.filter((each) => each.devices >= collective.devices), (each) => each.devices);
  const sides = [below, above].filter(Boolean);
  const chosen = sides[0].devices !== sides.at(-1).devices ? sides : sides.slice(0, 1);
  const errors = chosen.map((each) =>
    Math.hypot(stated(machine, each), constants.SCALED_STEP * Math.log2(each.devices / collective.devices)));
  const [, openShare] = sharing(machine, chosen[0].layout, collective);
  const others = racks(machine, chosen[0], collective).some((factor) => factor !== 1);
  const error = Math.hypot(Math.min(...errors), layoutError(machine, asked, levels), openShare,
    others ? constants.ASSUMED_LINK : 0);
  return {tables: chosen, error};
}

function layoutError({constants}, asked, levels) {
  const bothKnown = levels.has("inside") && levels.has("across");
  const told = asked === "inside" ? levels.has("inside") : asked === "across" || !bothKnown;
  return told ? 0 : constants.UNMEASURED_LAYOUT;
}

/** The points of the nearest tables, scaled by the rounds and bytes that the algorithm counts here and there. */
function scaledPoints(machine, {tables}, collective) {
  const inside = [collective, ...tables].some(({layout}) => levelOf(machine, layout) === "inside");
  const here = counts(machine, collective, inside);
  const there = tables.map((table) => counts(machine, table, inside));
  const curves = tables.map((table) => tableCurve(machine, table));
  const sizes = unique(curves.flatMap((curve) => curve.sizes)).sort((a, b) => a - b);
  const along = curves.map((curve) => sizes.map((size) => alongPoints(curve, size)));
  const scaled = tables.map((table, i) => {
    const [share] = sharing(machine, table.layout, collective);
    const [ofMessage, ofByte] = racks(machine, table, collective);
    const rounds = ofMessage * here.rounds / there[i].rounds;
    const bytes = ofByte * share * here.bytes / there[i].bytes;
    return along[i].map((seconds) => {
      const alpha = Math.min(along[i][0], seconds);
      return alpha * rounds + (seconds - alpha) * bytes;
    });
  });
  let times = scaled[0];
  if (tables.length > 1) {
    const [few, many] = tables.map((table) => Math.log2(table.devices));
    const weight = (Math.log2(collective.devices) - few) / (many - few);
    const between = (count, ...ends) => Math.min(...ends) <= count && count <= Math.max(...ends);
    const within = between(here.rounds, there[0].rounds, there[1].rounds) &&
      between(here.bytes, there[0].bytes, there[1].bytes);
    times = times.map((seconds, i) => {
      const mean = seconds ** (1 - weight) * scaled[1][i] ** weight;
      if (!within) return mean;
      return Math.min(Math.max(mean, Math.min(along[0][i], along[1][i])), Math.max(along[0][i], along[1][i]));
    });
  }
  let highest = -Infinity;
  return {sizes, rows: [times.map((seconds) => (highest = Math.max(highest, seconds)))]};
}

/** Seconds at a size along points, which go on beyond the last as between the last two. */
function alongPoints({sizes, rows: [times]}, size) {
  const [low, weight] = segment(sizes, size);
  return times[low] + weight * (times[low + 1] - times[low]);
}

/** Rounds and bytes of a collective on its slowest link. */
function counts(machine, collective, inside) {
  const {layout, devices} = collective;
  const [nodes, ofANode] = inside ? [1, devices] : nodeCounts(layout, devices);
  const lines = linesOf(collective, nodes, ofANode);
  const smallest = (count) => Math.min(...lines.map(count));
  if (nodes === 1) {
    return {
      rounds: smallest((each) => each.alpha + each.alpha_in_node),
      bytes: smallest((each) => each.beta + each.beta_in_node),
    };
  }
  const senders = (each) => (machine.emulated_network ? 1 : each.senders);
  return {rounds: smallest((each) => each.alpha), bytes: smallest((each) => each.beta * senders(each))};
}

/** [factor on the bytes' time for another number of devices of a node, standard error of it]. */
function sharing(machine, layout, collective) {
  const ofALibrary = ["library", "elsewhere"].includes(machine.algorithms[collective.algorithm].place);
  if (machine.emulated_network || !ofALibrary) return [1, 0];
  const [before, after] = [layout, collective.layout].map((each) => nodeCounts(each, 1)[1]);
  const level = levelOfCollective(machine, collective);
  if (level === "inside") {
    return [machine.wiring === "mesh" && Math.min(before, after) > 1 ? (before - 1) / (after - 1) : 1, 0];
  }
  if (level !== "across") return [1, 0];
  const adapters = machine.network_adapters;
  if (adapters !== null) return [Math.min(adapters, before) / Math.min(adapters, after), 0];
  const ratio = before / after;
  return [Math.sqrt(ratio), Math.abs(Math.log(ratio)) / 2 / machine.constants.DEVIATIONS];
}

/** [factor on a message's time, on a byte's] between the links that two collectives cross. */
function racks(machine, before, after) {
  const crossed = ({layout, devices}) => {
    const [nodes] = nodeCounts(layout, devices);
    return machine.link_between_racks && nodes > machine.nodes_per_rack ? "racks" : "nodes";
  };
  if (!machine.link || crossed(before) === crossed(after)) return [1, 1];
  const [first, second] = [before, after].map(({layout, devices}) =>
    linkBetween(machine, nodeCounts(layout, devices)[0]));
  const ofMessage = messageS(first) > 0 ? messageS(second) / messageS(first) : 1;
  return [ofMessage, first.bandwidth_bytes_per_s / second.bandwidth_bytes_per_s];
}
