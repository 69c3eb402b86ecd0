// What the link's formula says of a collective, as dpsim/model/formulas.py.

const messageS = (link) => link.latency_s + link.message_overhead_s;

/** The link between so many nodes: in each field the slower of those within and between racks. */
function linkBetween({link, link_between_racks: beyond, nodes_per_rack}, nodes) {
  if (!link || !beyond || nodes <= nodes_per_rack) return link;
  const slower = {...beyond, bandwidth_bytes_per_s: Math.min(link.bandwidth_bytes_per_s, beyond.bandwidth_bytes_per_s)};
  for (const name of ["latency_s", "reduce_s_per_byte", "message_overhead_s", "bucket_overhead_s"]) {
    slower[name] = Math.max(link[name], beyond[name]);
  }
  return slower;
}

/** The lowest of a collective's lines at each size, by the machine's link. */
function linkPoints(machine, collective) {
  const [nodes, ofANode] = nodeCounts(collective.layout, collective.devices);
  const inNode = machine.link_in_node ?? machine.link;
  const across = nodes === 1 ? inNode : linkBetween(machine, nodes) ?? machine.link;
  return lowest(linesOf(collective, nodes, ofANode).map((each) => {
    const senders = machine.emulated_network ? 1 : each.senders;
    const base = each.alpha * messageS(across) + each.alpha_in_node * messageS(inNode) +
      (each.alpha ? across.bucket_overhead_s : inNode.bucket_overhead_s);
    const slope = each.beta * senders / across.bandwidth_bytes_per_s + each.gamma * across.reduce_s_per_byte +
      each.beta_in_node / inNode.bandwidth_bytes_per_s + each.gamma_in_node * inNode.reduce_s_per_byte;
    return [base, slope];
  }));
}

/** The lower envelope of lines (value at 0, slope). */
function lowest(lines) {
  const crossings = new Set([0]);
  lines.forEach(([base, slope], i) => lines.slice(i + 1).forEach(([otherBase, otherSlope]) => {
    const crossing = (otherBase - base) / (slope - otherSlope);
    if (slope !== otherSlope && crossing >= 1) crossings.add(crossing);
  }));
  const sizes = [...crossings].sort((a, b) => a - b);
  sizes.push(2 * Math.max(sizes.at(-1), MIB));
  return {sizes, rows: [sizes.map((size) => Math.min(...lines.map(([base, slope]) => base + slope * size)))]};
}
