// Numbers as the page says them: three digits, with units.

const digits = (value) => String(Number(value.toPrecision(3)));

const UNITS = [[1, "s"], [1e-3, "ms"], [1e-6, "us"], [1e-9, "ns"]];

function duration(seconds) {
  const [scale, unit] = UNITS.find(([each]) => seconds >= each) ?? UNITS[0];
  return `${digits(seconds / scale)} ${unit}`;
}

/** Two ends with one unit: "164-215 ms". */
function span(low, high) {
  if (!Number.isFinite(high)) return `at least ${duration(low)}`;
  const [number, unit] = duration(high).split(" ");
  const [scale] = UNITS.find(([, name]) => name === unit);
  return `${digits(low / scale)} to ${number} ${unit}`;
}

function size(bytes) {
  if (bytes === 0 || bytes === Infinity) return bytes ? "inf" : "0";
  const unit = ["B", "KiB", "MiB", "GiB"][Math.min(Math.floor(Math.log2(Math.max(bytes, 1)) / 10), 3)];
  return `${digits(bytes / {B: 1, KiB: 2 ** 10, MiB: 2 ** 20, GiB: 2 ** 30}[unit])} ${unit}`;
}

function bandwidth(bytesPerS) {
  const bits = 8 * bytesPerS;
  return bits >= 1e9 ? `${digits(bits / 1e9)} Gbit/s` : `${digits(bits / 1e6)} Mbit/s`;
}

const times = (factor) => `${digits(factor)} times as long`;
const count = (value) => value.toLocaleString("en");
const percent = (share) => `${digits(100 * share)} %`;
