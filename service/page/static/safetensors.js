// The format safetensors: an 8-byte length, a JSON header, and little-endian numbers.

export function parseSafetensors(buffer) {
  const size = Number(new DataView(buffer).getBigUint64(0, true));
  const { __metadata__: metadata, ...entries } = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 8, size)));
  const tensors = Object.fromEntries(Object.entries(entries).map(([name, { shape, data_offsets: [start, end] }]) =>
    [name, { shape, values: floats(buffer.slice(8 + size + start, 8 + size + end)) }]));
  return { metadata, tensors };
}

// Typed arrays have the byte order of the machine, and the format has one.
function floats(bytes) {
  const view = new DataView(bytes);
  return Float32Array.from({ length: bytes.byteLength / 4 }, (_, index) => view.getFloat32(4 * index, true));
}
