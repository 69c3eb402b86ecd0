// What a collective costs on a machine, as dpsim/model/cost.py: by its tables, by the nearest tables, scaled
// (scaling.js), or by the link's formula (link.js). A curve is {sizes, rows, first, last, scaled}: rows of seconds
// against sizes in bytes; sizes from `first` to `last` count as known.

const NOTHING = {first: Infinity, last: -1};
const MOST_REMEMBERED = 500;

/** The place of a size among ascending sizes: [column, weight]; below the first size 0, above 1 beyond the last. */
function segment(sizes, size) {
  let low = 0;
  let high = sizes.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (sizes[middle] <= size) low = middle;
    else high = middle;
  }
  return [low, Math.max(0, (size - sizes[low]) / (sizes[high] - sizes[low]))];
}

/** A row of a curve at a size; nothing is sent for nothing. */
function at({sizes, rows}, row, size) {
  if (size <= 0) return 0;
  const [low, weight] = segment(sizes, size);
  return rows[row][low] + weight * (rows[row][low + 1] - rows[row][low]);
}

const ROUNDING = 1e-12;

/** x >= 0 nearest to alpha + beta M = seconds, by the relative error. */
function fittedLine(sizes, times) {
  const kept = range(0, sizes.length).filter((i) => times[i] > 0 && sizes[i] > 0);
  if (!kept.length) return [0, 0];
  if (kept.length === 1) return [0, times[kept[0]] / sizes[kept[0]]];
  const a = kept.map((i) => 1 / times[i]);
  const b = kept.map((i) => sizes[i] / times[i]);
  const [scaleA, scaleB] = [Math.max(...a), Math.max(...b)];
  let [aa, ab, bb, a1, b1] = [0, 0, 0, 0, 0];
  kept.forEach((_, i) => {
    const [x, y] = [a[i] / scaleA, b[i] / scaleB];
    aa += x * x; ab += x * y; bb += y * y; a1 += x; b1 += y;
  });
  const determinant = aa * bb - ab * ab;
  const both = [(a1 * bb - b1 * ab) / determinant, (b1 * aa - a1 * ab) / determinant];
  const error = ([x, y]) => aa * x * x + 2 * ab * x * y + bb * y * y - 2 * (a1 * x + b1 * y);
  const alone = [[Math.max(a1 / aa, 0), 0], [0, Math.max(b1 / bb, 0)]];
  const [x, y] = both.every((value) => value >= 0) ? both : error(alone[0]) < error(alone[1]) ? alone[0] : alone[1];
  const rounded = (value) => (value < ROUNDING ? 0 : value);
  return [rounded(x) / scaleA, rounded(y) / scaleB];
}

/** A table's sizes and rows, one more point at size 0 and one at twice the last size. */
function continued(sizes, rows) {
  const count = sizes.length;
  const last = sizes[count - 1];
  let slopes;
  if (count === 1) slopes = rows.map((row) => (last > 0 ? row[0] / last : 0));
  else {
    const upTo = sizes.filter((size) => size <= last / 2).length;
    const base = Math.min(Math.max(upTo - 1, 0), count - 2);
    slopes = rows.map((row) => Math.max((row[count - 1] - row[base]) / (last - sizes[base]), 0));
  }
  const step = Math.max(last, 1);
  const beyond = rows.map((row, i) => [...row, row[count - 1] + slopes[i] * step]);
  if (sizes[0] === 0) return {sizes: [...sizes, last + step], rows: beyond};
  const first = rows[0][0];
  const share = first > 0 ? Math.min(fittedLine(sizes, rows[0])[0] / first, 1) : 1;
  return {sizes: [0, ...sizes, last + step], rows: beyond.map((row) => [row[0] * share, ...row])};
}

const tablesOf = (machine, kind) => (kind === "allreduce" ? machine.allreduce : machine.halves);
const whole = (collective) => ({...collective, kind: "allreduce"});

/** The table of this kind, algorithm, device count and layout; for flat devices also that of one node, or of nodes. */
function tableFor(tables, {kind, algorithm, devices, layout}) {
  const alike = tables.filter((each) => each.kind === kind && each.algorithm === algorithm && each.devices === devices);
  let fitting = alike.filter((each) => each.layout === layout);
  if (!fitting.length && !layout) {
    fitting = alike.filter((each) => nodeCounts(each.layout, devices).includes(1));
    if (unique(fitting.map((each) => each.layout)).length !== 1) fitting = [];
  }
  return fitting.find((each) => each.wire_dtype === "float32") ?? fitting[0];
}

/** A table's sizes for gradients sent as float32. */
function sizesOnTheWire(machine, table) {
  const share = machine.algorithms[table.algorithm].sixteen_bit_messages ? table.wire_share : 1;
  return table.sizes_bytes.map((size) => size * share);
}
const known = (table) => table.wire_dtype === "float32"
  ? {first: table.sizes_bytes[0], last: table.sizes_bytes.at(-1)} : NOTHING;
const tableCurve = (machine, table) => continued(sizesOnTheWire(machine, table), [table.time_s]);

/** The cost curve of a collective with nothing else running. Throws where the machine does not say it. */
const idleCurve = remembered(nameOf, (machine, collective) => {
  if (collective.devices === 1) return {sizes: [0, 1], rows: [[0, 0]], first: 0, last: Infinity};
  const tables = tablesOf(machine, collective.kind);
  const table = tableFor(tables, collective);
  if (table) return {...tableCurve(machine, table), ...known(table)};
  refuseUnknownInside(machine, collective);
  refuseBeyondANode(machine, collective);
  const near = nearestTables(machine, tables, collective);
  if (near) return {...scaledPoints(machine, near, collective), ...NOTHING, scaled: near};
  if (collective.kind !== "allreduce" && hasTables(machine, whole(collective))) {
    return {...halved(idleCurve(machine, whole(collective))), ...NOTHING};
  }
  if (!machine.link) {
    throw new Error(`this machine does not say what ${collective.kind} by ${collective.algorithm} costs on ` +
      `${collective.layout || collective.devices} devices`);
  }
  if (nodeCounts(collective.layout, 1)[0] > 1 && machine.of_one_node) {
    throw new Error(`this machine was calibrated on one node, and says nothing of ${collective.layout} devices`);
  }
  return {...linkPoints(machine, collective), ...NOTHING};
});

/** Throws for devices inside one node where only collectives of several nodes were measured. */
function refuseUnknownInside(machine, collective) {
  if (!machine.of_several_nodes || levelOfCollective(machine, collective) !== "inside") return;
  if (machine.cores && !collective.layout) return;
  throw new Error(`this machine was measured on several nodes alone, and says nothing of ` +
    `${collective.layout || collective.devices} devices inside one`);
}

/** Throws for flat devices that do not fit into the largest node, where nothing but one node was measured. */
function refuseBeyondANode(machine, {devices, layout}) {
  if (layout || machine.largest_node === null || devices <= machine.largest_node) return;
  throw new Error(`this machine was measured inside one node of ${machine.largest_node} alone, and nothing says how ` +
    `many nodes ${devices} devices are on`);
}

function nameOf({kind, algorithm, devices, layout}) {
  return `${kind},${algorithm},${devices},${layout}`;
}

/** A curve whose collectives take so many seconds longer, whatever their size. */
const delayed = (curve, seconds) =>
  ({...curve, rows: [curve.rows[0].map((each) => each + seconds), ...curve.rows.slice(1)]});
const halved = ({sizes, rows}) => ({sizes, rows: rows.map((row) => row.map((seconds) => seconds / 2))});
const hasTables = (machine, collective) => {
  const tables = tablesOf(machine, collective.kind);
  return Boolean(tableFor(tables, collective) ?? nearestTables(machine, tables, collective));
};

/** The cost curve of the sums that computation stops for. */
function sumsCurve(machine, collective) {
  const sums = {...collective, kind: "ordered-sum", algorithm: "direct"};
  return idleCurve(machine, tableFor(machine.halves, sums) ? sums : collective);
}

/** The curve of a copy inside each device's memory, by the table of the nearest device count, if there is one. */
function copyCurve(machine, {devices}) {
  const tables = machine.halves.filter((table) => table.kind === "copy");
  const table = least(tables, (each) => Math.abs(each.devices - devices));
  return table && tableCurve(machine, table);
}

/** The curve of one message between two devices: flat, "1x2" in one node, "2x1" in two. */
const sendCurve = remembered(String, (machine, layout) => {
  const table = sendTable(machine, layout);
  if (table) return {...tableCurve(machine, table), ...known(table)};
  const paced = emulatedLink(machine, layout);
  if (paced) return {...lowest([[paced.latency_s, 1 / paced.bandwidth_bytes_per_s]]), first: 0, last: Infinity};
  if (!machine.link) throw new Error("this machine does not say what a message between two devices costs");
  const across = nodeCounts(layout, 2)[0] > 1;
  if (layout && across && machine.of_one_node) {
    throw new Error("this machine was calibrated on one node, and says nothing of messages between nodes");
  }
  if (layout) refuseUnknownInside(machine, {layout, devices: 2});
  const link = across ? linkBetween(machine, 2) ?? machine.link : machine.link_in_node ?? machine.link;
  return {...lowest([[messageS(link), 1 / link.bandwidth_bytes_per_s]]), ...NOTHING};
});

function sendTable(machine, layout) {
  const level = levelOf(machine, layout);
  const alike = machine.halves.filter((each) => each.kind === "send" && levelOf(machine, each.layout) === level);
  return least(alike, (table) => table.layout !== layout);
}

/** The emulated link between two devices in a layout, if there is one. */
function emulatedLink(machine, layout) {
  return machine.emulated_network && levelOf(machine, layout) === "across" ? machine.emulated_link : null;
}

/** [curve with seconds beside backward and compute seconds lost, seconds of one poll]. */
function overlappedCurve(machine, collective, overlap) {
  const ofMechanism = machine.overlap.filter((table) => table.overlap === overlap);
  const ofAnyKind = ofMechanism.filter((table) => table.algorithm === collective.algorithm);
  const ofAlgorithm = ofAnyKind.filter((table) => table.kind === collective.kind);
  if (ofAnyKind.length && !ofAlgorithm.length && collective.kind !== "allreduce") {
    const [curve, pollS] = overlappedCurve(machine, whole(collective), overlap);
    return [{...halved(curve), ...NOTHING}, pollS];
  }
  const table = tableFor(ofAlgorithm, collective);
  if (table) {
    const curve = continued(sizesOnTheWire(machine, table), [table.time_s, table.compute_loss_s]);
    return [{...curve, first: 0, last: known(table).last}, table.poll_s];
  }
  const idle = idleCurve(machine, collective);
  if (!ofAlgorithm.length) {
    const inside = levelOfCollective(machine, collective) === "inside";
    const rows = [machine.contention ?? 1, inside ? machine.computation_taken ?? 0 : 0]
      .map((factor) => idle.rows[0].map((seconds) => factor * seconds));
    return [{sizes: idle.sizes, rows, ...(ofMechanism.length ? NOTHING : {first: 0, last: Infinity})}, 0];
  }
  const nearest = least(ofAlgorithm, (each) => Math.abs(each.devices - collective.devices),
    (each) => each.layout, (each) => each.wire_dtype !== "float32");
  const {algorithm, devices, layout, kind} = nearest;
  const alone = idleCurve(machine, {algorithm, devices, layout, kind});
  const sizes = sizesOnTheWire(machine, nearest);
  const longer = nearest.time_s.map((seconds, i) => {
    const before = at(alone, 0, nearest.sizes_bytes[i]);
    return at(idle, 0, sizes[i]) * (before > 0 ? seconds / before : 1);
  });
  return [{...continued(sizes, [longer, nearest.compute_loss_s]), ...NOTHING}, nearest.poll_s];
}

/** [alpha, beta] of the line nearest to a collective's cost. */
function nearestLine(machine, collective) {
  if (collective.devices === 1) return [0, 0];
  const table = tableFor(tablesOf(machine, collective.kind), collective);
  if (table) return fittedLine(sizesOnTheWire(machine, table), table.time_s);
  if (collective.kind !== "allreduce" && !hasTables(machine, collective) && hasTables(machine, whole(collective))) {
    return nearestLine(machine, whole(collective)).map((each) => each / 2);
  }
  const {sizes, rows: [times], scaled} = idleCurve(machine, collective);
  if (scaled) return fittedLine(sizes, times);
  const count = sizes.length;
  return [times[0], (times[count - 1] - times[count - 2]) / (sizes[count - 1] - sizes[count - 2])];
}

/** The first of the values for which the keys, compared one after another, are the least; undefined without any. */
function least(values, ...keys) {
  const before = (a, b) => {
    for (const key of keys) {
      const [first, second] = [key(a), key(b)];
      if (first !== second) return first < second;
    }
    return false;
  };
  return values.reduce((best, each) => (best === undefined || before(each, best) ? each : best), undefined);
}

/** A pure function of an object and of others, which `key` tells apart, that is computed once for each. */
function remembered(key, compute) {
  const known = new WeakMap();
  return (owner, ...others) => {
    if (!known.has(owner)) known.set(owner, new Map());
    const results = known.get(owner);
    const name = key(...others);
    if (!results.has(name)) {
      if (results.size >= MOST_REMEMBERED) results.clear();
      results.set(name, compute(owner, ...others));
    }
    return results.get(name);
  };
}
