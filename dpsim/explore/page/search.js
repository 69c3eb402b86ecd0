// The best setting: every strategy, fusion rule and threshold at the devices, batch and network of a setting.

const TRIED_BYTES = [0, 2 ** 16, 2 ** 18, 2 ** 20, 2 ** 22, 2 ** 24, 2 ** 26, Infinity];

/** The settings to compare with one. */
function candidates(world, setting) {
  return Object.keys(world.strategies).flatMap((strategy) =>
    Object.keys(world.rules).filter(isPricedRule).flatMap((fusion_rule) => {
      const takes = world.rules[fusion_rule].default_threshold_bytes !== null;
      return (takes ? [null, ...TRIED_BYTES] : [null]).map((fusion_threshold_bytes) =>
        ({...setting, strategy, fusion_rule, fusion_threshold_bytes}));
    }));
}

/** The prediction of a setting; null for one that is impossible. */
function predictionOrNone(world, setting) {
  try {
    return predict(world, forEngine(world, setting));
  } catch {
    return null;
  }
}

/** The step of a setting in seconds; Infinity for one that is impossible. */
function stepOrNever(world, setting) {
  try {
    return stepS(world, forEngine(world, setting));
  } catch {
    return Infinity;
  }
}
