// Parts of blocks between a sequence on the GPU and wherever the GPU can read and write: its own memory, a neighbour's slab,
// pinned host memory. Blocks of threads (x: pieces of a part, y: the part).
//
// A row of `parts` is {keys, values, layer, start, tokens}: where the part's two halves begin, each [tokens, HEADS, DIM], and which
// tokens of the sequence they are. The sequence is keys [layer, head, tile, DIM, KEY_TILE], values [layer, head, token, DIM].

#define PART_FIELDS 5

typedef long long Long;

struct Cell {
    Long key, value;
};

// Where element i of a part's half, [token, head, dim], stands in the sequence.
__device__ Cell cell(Long i, Long layer, Long start, Long tiles, Long capacity) {
    Long token = start + i / (HEADS * DIM), head = layer * HEADS + i / DIM % HEADS, dim = i % DIM;
    Long key = ((head * tiles + token / KEY_TILE) * DIM + dim) * KEY_TILE + token % KEY_TILE;
    return {key, (head * capacity + token) * DIM + dim};
}

extern "C" __global__ void scatter(const Long* parts, float* keys, float* values, Long tiles, Long capacity) {
    const Long* part = parts + blockIdx.y * PART_FIELDS;
    const float *from_keys = (const float*)part[0], *from_values = (const float*)part[1];
    Long layer = part[2], start = part[3], count = part[4] * HEADS * DIM, step = (Long)gridDim.x * blockDim.x;
    for (Long i = (Long)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += step) {
        Cell to = cell(i, layer, start, tiles, capacity);
        keys[to.key] = from_keys[i];
        values[to.value] = from_values[i];
    }
}

// What lies beyond a part's tokens, up to `room` of them, becomes zero.
extern "C" __global__ void gather(const Long* parts, const float* keys, const float* values, Long tiles, Long capacity, Long room) {
    const Long* part = parts + blockIdx.y * PART_FIELDS;
    float *to_keys = (float*)part[0], *to_values = (float*)part[1];
    Long layer = part[2], start = part[3], count = part[4] * HEADS * DIM, step = (Long)gridDim.x * blockDim.x;
    for (Long i = (Long)blockIdx.x * blockDim.x + threadIdx.x; i < room * HEADS * DIM; i += step) {
        if (i < count) {
            Cell from = cell(i, layer, start, tiles, capacity);
            to_keys[i] = keys[from.key];
            to_values[i] = values[from.value];
        } else {
            to_keys[i] = to_values[i] = 0;
        }
    }
}
