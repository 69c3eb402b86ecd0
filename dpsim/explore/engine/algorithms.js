// The closed forms of the allreduce algorithms, as dpsim/algorithms.py: alpha, beta and gamma of a link, and rounds.

const line = (alpha, beta, gamma, inNode = {}) =>
  ({alpha, beta, gamma, alpha_in_node: 0, beta_in_node: 0, gamma_in_node: 0, senders: 1, ...inNode});

/** log2 of the largest power of two that n reaches, that power, and whether n is larger. */
function folded(n) {
  const log2 = Math.floor(Math.log2(n) + 1e-12);
  return {log2, power: 2 ** log2, extra: 2 ** log2 < n ? 1 : 0};
}

const ringLines = (nodes, ofANode) => {
  const n = nodes * ofANode;
  return [line(2 * (n - 1), 2 * (n - 1) / n, (n - 1) / n)];
};
const oneShotLines = (nodes, ofANode) => {
  const others = nodes * ofANode - 1;
  return [line(others, others, others)];
};
const doublingLines = (nodes, ofANode) => {
  const {log2, extra} = folded(nodes * ofANode);
  return [line(log2 + 2 * extra, log2 + 2 * extra, log2 + extra)];
};
const halvingLines = (nodes, ofANode) => {
  const {log2, power, extra} = folded(nodes * ofANode);
  const share = (power - 1) / power;
  return [line(2 * log2 + 2 * extra, 2 * share + 2 * extra, share + extra)];
};
const libraryLines = (nodes, ofANode) =>
  [...doublingLines(nodes, ofANode), ...halvingLines(nodes, ofANode), ...ringLines(nodes, ofANode)];
const hierarchicalLines = (m, k) => {
  const across = (m - 1) / m / k;
  const inside = (k - 1) / k;
  const inNode = {alpha_in_node: 2 * (k - 1), beta_in_node: 2 * inside, gamma_in_node: inside, senders: k};
  return [line(2 * (m - 1), 2 * across, across, inNode)];
};

// A protocol each (LL, LL128, Simple): microseconds of the start, a hop over NVLink, a hop over the network, and the
// share of the link's bandwidth, from NCCL's tuning model.
const NCCL_RING = [[6.6, 0.6, 2.7, 0.5], [14.0, 1.9, 4.0, 0.92], [8.4, 3.4, 14.0, 1.0]];
const NCCL_TREE = [[6.8, 0.6, 5.0, 0.92 / 3.8], [14.0, 1.25, 8.5, 0.92 * 0.92], [8.4, 4.0, 14.0, 0.92]];
const ncclHop = (nodes) => NCCL_RING[0][nodes === 1 ? 1 : 2];
const ncclRing = (nodes, ofANode, turns) => {
  const n = nodes * ofANode;
  const part = (n - 1) / n;
  return NCCL_RING.map(([start, inside, network, share]) => {
    const us = start + turns * ((n - nodes) * inside + (nodes - 1) * network);
    return line(us / ncclHop(nodes), turns * part / share, turns * part / 2);
  });
};
const ncclTree = (nodes, ofANode) => NCCL_TREE.map(([start, inside, network, share]) =>
  line((start + 2 * ((ofANode - 1) * inside + Math.log2(nodes) * network)) / ncclHop(nodes), 2 / share, 1));

const log2Rounds = (each) => (nodes, ofANode) => {
  const {log2, extra} = folded(nodes * ofANode);
  return each * log2 + 2 * extra;
};

/** By name: lines(nodes, devices of a node), the lowest of which is the cost at each size, and rounds of messages. */
const ALGORITHMS = {
  "auto": {lines: libraryLines, rounds: () => 2},
  "one-shot": {lines: oneShotLines, rounds: () => 1},
  "two-shot": {lines: ringLines, rounds: () => 2},
  "mpi": {lines: libraryLines, rounds: () => 1},
  "ring": {lines: ringLines, rounds: (nodes, ofANode) => 2 * (nodes * ofANode - 1)},
  "recursive-doubling": {lines: doublingLines, rounds: log2Rounds(1)},
  "halving-doubling": {lines: halvingLines, rounds: log2Rounds(2)},
  "direct": {lines: ringLines, rounds: () => 2},
  "hierarchical": {lines: hierarchicalLines, rounds: (m, k) => 2 * ((m > 1) + (k > 1))},
  "nccl": {lines: (m, k) => [...ncclRing(m, k, 2), ...ncclTree(m, k)], rounds: () => 1},
  "gloo": {lines: ringLines, rounds: () => 1},
};

/** The lines of a collective. A reduce-scatter or an all-gather is half of the allreduce, but for NCCL's start. */
function linesOf({algorithm, kind}, nodes, ofANode) {
  const half = kind === "reduce-scatter" || kind === "all-gather";
  if (half && algorithm === "nccl") return ncclRing(nodes, ofANode, 1);
  const lines = ALGORITHMS[algorithm].lines(nodes, ofANode);
  if (!half) return lines;
  const halved = (value, name) => name === "senders" ? value : value / 2;
  return lines.map((each) =>
    Object.fromEntries(Object.entries(each).map(([name, value]) => [name, halved(value, name)])));
}

/** Rounds of messages that follow one another, each of which ends when a rank polls. */
function roundsOf(collective) {
  if (collective.devices === 1) return 1;
  const [nodes, ofANode] = nodeCounts(collective.layout, collective.devices);
  const count = ALGORITHMS[collective.algorithm].rounds(nodes, ofANode);
  return collective.kind === "allreduce" ? count : Math.ceil(count / 2);
}

/** [nodes, devices of a node] of "2x4"; of a flat layout (empty) each device is a node. */
function nodeCounts(layout, devices) {
  return layout ? layout.split("x").map(Number) : [devices, 1];
}
