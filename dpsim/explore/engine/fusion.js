// Gradient tensors -> buckets, as dpsim/lowering/fusion.py. Tensors stand in the order in which backward makes them
// final. A rule returns where each bucket begins, and the number of tensors at the end.

const MIB = 2 ** 20;

/** Add a tensor, then close the bucket once it holds its limit; the last limit holds for all buckets that follow. */
function closedAt(tensors, limits) {
  const starts = [0];
  const full = new Map();
  let size = 0;
  tensors.forEach((tensor, i) => {
    size += tensor.size_bytes;
    const closed = full.get(tensor.dtype) ?? 0;
    const enough = size >= limits[Math.min(closed, limits.length - 1)];
    if (enough) full.set(tensor.dtype, closed + 1);
    if (enough || i + 1 === tensors.length || tensors[i + 1].dtype !== tensor.dtype) {
      starts.push(i + 1);
      size = 0;
    }
  });
  return starts;
}

/** Close a bucket before the tensor that would make it larger than the limit. */
function closedBefore(tensors, limit) {
  const starts = [0];
  let size = 0;
  tensors.forEach((tensor, i) => {
    const full = limit === 0 || size + tensor.size_bytes > limit;
    if (i > 0 && (full || tensor.dtype !== tensors[i - 1].dtype)) {
      starts.push(i);
      size = 0;
    }
    size += tensor.size_bytes;
  });
  if (tensors.length) starts.push(tensors.length);
  return starts;
}

/** The buckets of a rule that fills them in the order of the parameters, in the order in which they are ready. */
function fromFirstLayer(rule, tensors) {
  return rule([...tensors].reverse()).reverse().map((start) => tensors.length - start);
}

/** Merge a bucket into the next tensor where that hides more communication (MG-WFBP). */
function mergedByCost(tensors, readyS, alphaS, betaSPerByte) {
  if (!tensors.length) return [0];
  const starts = [0];
  let size = tensors[0].size_bytes;
  let tau = readyS[0];
  for (let i = 1; i < tensors.length; i++) {
    const cost = alphaS + betaSPerByte * size;
    const ready = readyS[i];
    const hides = ready < tau + cost && (tau > ready || ready - tau < alphaS);
    if (hides && tensors[i].dtype === tensors[i - 1].dtype) {
      size += tensors[i].size_bytes;
      tau = Math.max(tau, ready);
    } else {
      starts.push(i);
      size = tensors[i].size_bytes;
      tau = Math.max(tau + cost, ready);
    }
  }
  starts.push(tensors.length);
  return starts;
}

/** The static rules by name: (tensors, threshold in bytes, whether it is the rule's own, costs) -> starts. */
const FUSION_RULES = {
  "tarantella": (tensors, threshold) => closedAt(tensors, [threshold]),
  "ddp": (tensors, threshold, isDefault) => closedAt(tensors, isDefault ? [MIB, threshold] : [threshold]),
  "ddp-2.3": (tensors, threshold) => closedAt(tensors, [MIB, threshold]),
  "ddp-1.5": (tensors, threshold) => fromFirstLayer((each) => closedAt(each, [MIB, threshold]), tensors),
  "capped": closedBefore,
  "capped-forward": (tensors, threshold) => fromFirstLayer((each) => closedBefore(each, threshold), tensors),
  "per-tensor": (tensors) => closedAt(tensors, [0]),
  "fsdp": (tensors) => closedAt(tensors, [0]),
  "one": (tensors) => closedAt(tensors, [Infinity]),
  "mg-wfbp": (tensors, _, __, costs) => mergedByCost(tensors, costs.ready_s, costs.alpha_s, costs.beta_s_per_byte),
};

/** Horovod's cycle: buckets (lists of positions) of the tensors that became ready since the last one. */
function packed(tensors, thresholdBytes) {
  const padded = tensors.map((tensor) => Math.ceil(tensor.size_bytes / 16) * 16);
  let waiting = tensors.map((_, i) => i);
  if (thresholdBytes === 0) return waiting.map((i) => [i]);
  const buckets = [];
  while (waiting.length) {
    const [first, ...others] = waiting;
    const bucket = [first];
    const passed = [];
    let total = padded[first];
    let passedBytes = 0;
    for (const [position, i] of others.entries()) {
      if (tensors[i].dtype === tensors[first].dtype && total + padded[i] <= thresholdBytes) {
        bucket.push(i);
        total += padded[i];
        continue;
      }
      passedBytes += padded[i];
      if (total + passedBytes > thresholdBytes) {
        passed.push(...others.slice(position));
        break;
      }
      passed.push(i);
    }
    buckets.push(bucket);
    waiting = passed;
  }
  return buckets;
}
