// The steps of a GPU's engine between its products. float32; a block of threads for each row, unless said otherwise.
//
// GROUP: query heads for each KV head. DIM: of a head. KEY_TILE: tokens in a transposed tile of keys (kv_cache.py).
// A sequence's row of `caches` is {keys, values, tiles, capacity, position}: addresses of [layer, kv_head, tile, DIM, KEY_TILE]
// and [layer, kv_head, token, DIM], the sizes of their third axes, and where its new token goes.

#define THREADS 256
#define WARP 32
#define WARPS (THREADS / WARP)
#define CACHE_FIELDS 5
#define LEAST __int_as_float(0xff800000)  // minus infinity

typedef long long Long;

__device__ float warp_sum(float value) {
    for (int offset = WARP / 2; offset; offset /= 2) value += __shfl_xor_sync(0xffffffffu, value, offset);
    return value;
}

__device__ float warp_max(float value) {
    for (int offset = WARP / 2; offset; offset /= 2) value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, offset));
    return value;
}

// Of all threads' values, in all threads. `scratch`: WARPS floats.
__device__ float block_sum(float value, float* scratch) {
    value = warp_sum(value);
    __syncthreads();
    if (threadIdx.x % WARP == 0) scratch[threadIdx.x / WARP] = value;
    __syncthreads();
    value = 0;
    for (int warp = 0; warp < WARPS; warp++) value += scratch[warp];
    return value;
}

__device__ float block_max(float value, float* scratch) {
    value = warp_max(value);
    __syncthreads();
    if (threadIdx.x % WARP == 0) scratch[threadIdx.x / WARP] = value;
    __syncthreads();
    value = scratch[0];
    for (int warp = 1; warp < WARPS; warp++) value = fmaxf(value, scratch[warp]);
    return value;
}

// RMSNorm of x [n, width] into out [n, width].
extern "C" __global__ void normalize(const float* x, Long x_stride, const float* weight, float eps, float* out, Long out_stride,
                                     int width) {
    __shared__ float scratch[WARPS];
    x += blockIdx.x * x_stride;
    out += blockIdx.x * out_stride;
    float squares = 0;
    for (int i = threadIdx.x; i < width; i += THREADS) squares += x[i] * x[i];
    float scale = 1.0f / sqrtf(block_sum(squares, scratch) / width + eps);
    for (int i = threadIdx.x; i < width; i += THREADS) out[i] = x[i] * scale * weight[i];
}

// silu(gate) * up into out, each [n, width].
extern "C" __global__ void activate(const float* gate, const float* up, Long stride, float* out, Long out_stride, int width) {
    int i = blockIdx.y * THREADS + threadIdx.x;
    if (i >= width) return;
    float x = gate[blockIdx.x * stride + i];
    out[blockIdx.x * out_stride + i] = x / (1.0f + expf(-x)) * up[blockIdx.x * stride + i];
}

// Softmax's exponentials of scores [head, n, group, width] in place, where token i of the n sees the first visible + i keys; the
// rest of a row becomes 0. The sums of the rows into totals.
extern "C" __global__ void exponentiate(float* scores, Long width, int tokens, int group, Long visible, float* totals) {
    __shared__ float scratch[WARPS];
    float* row = scores + blockIdx.x * width;
    Long seen = visible + blockIdx.x / group % tokens;
    float highest = LEAST;
    for (Long i = threadIdx.x; i < seen; i += THREADS) highest = fmaxf(highest, row[i]);
    highest = block_max(highest, scratch);
    float total = 0;
    for (Long i = threadIdx.x; i < width; i += THREADS) {
        float weight = i < seen ? expf(row[i] - highest) : 0.0f;
        row[i] = weight;
        total += weight;
    }
    total = block_sum(total, scratch);
    if (threadIdx.x == 0) totals[blockIdx.x] = total;
}

// One new token of each sequence: its queries rotated and scaled into queries [n, kv_heads * GROUP, DIM], its keys rotated and its
// values into its cache. qkv: [n, (kv_heads * GROUP + 2 * kv_heads) * DIM], pairs of a rotation side by side.
extern "C" __global__ void rotate(const float* qkv, Long stride, const float* frequencies, const Long* caches, int layer,
                                  int kv_heads, float scale, float* queries) {
    const Long* cache = caches + blockIdx.x * CACHE_FIELDS;
    Long tiles = cache[2], capacity = cache[3], position = cache[4];
    float* keys = (float*)cache[0] + layer * kv_heads * tiles * DIM * KEY_TILE;
    float* values = (float*)cache[1] + layer * kv_heads * capacity * DIM;
    const float* row = qkv + blockIdx.x * stride;
    int query_pairs = kv_heads * GROUP * DIM / 2, pairs = query_pairs + kv_heads * DIM / 2;
    queries += (Long)blockIdx.x * query_pairs * 2;
    for (int i = threadIdx.x; i < pairs; i += THREADS) {
        int pair = i % (DIM / 2);
        float sine, cosine, x = row[2 * i], y = row[2 * i + 1];
        sincosf((float)position * frequencies[pair], &sine, &cosine);
        float first = x * cosine - y * sine, second = x * sine + y * cosine;
        if (i < query_pairs) {
            queries[2 * i] = first * scale;
            queries[2 * i + 1] = second * scale;
        } else {
            int head = (i - query_pairs) / (DIM / 2);
            float* tile = keys + (head * tiles + position / KEY_TILE) * DIM * KEY_TILE + position % KEY_TILE;
            tile[2 * pair * KEY_TILE] = first;
            tile[(2 * pair + 1) * KEY_TILE] = second;
        }
    }
    for (int i = threadIdx.x; i < kv_heads * DIM; i += THREADS)
        values[(i / DIM * capacity + position) * DIM + i % DIM] = row[2 * pairs + i];
}

// Attention of the new tokens over their sequences, the new token included, cut into splits of `span` tiles: block (split, KV head,
// row) leaves for each query head of its group DIM sums of weighted values, the highest score and the sum of the weights, in
// partial [n, kv_heads, splits, GROUP, DIM + 2]. (Split softmax as in FlashDecoding, https://arxiv.org/abs/2205.14135 for its parts.)
extern "C" __global__ void __launch_bounds__(THREADS) attend(const float* queries, const Long* caches, int layer, int kv_heads,
                                                             int span, float* partial) {
    const int TILES_AT_ONCE = THREADS / KEY_TILE, SHARES = THREADS / DIM;
    __shared__ float query[GROUP * DIM], weights[GROUP][THREADS], highest[GROUP], total[GROUP], rescale[GROUP];
    __shared__ float sums[THREADS];
    int split = blockIdx.x, head = blockIdx.y, row = blockIdx.z, thread = threadIdx.x;
    const Long* cache = caches + row * CACHE_FIELDS;
    Long tiles = cache[2], capacity = cache[3], visible = cache[4] + 1;
    const float* keys = (const float*)cache[0] + ((Long)layer * kv_heads + head) * tiles * DIM * KEY_TILE;
    const float* values = (const float*)cache[1] + ((Long)layer * kv_heads + head) * capacity * DIM;
    Long first = (Long)split * span, last = min(first + span, (visible + KEY_TILE - 1) / KEY_TILE);
    Long stop = min(last * KEY_TILE, visible);
    for (int i = thread; i < GROUP * DIM; i += THREADS) query[i] = queries[((Long)row * kv_heads + head) * GROUP * DIM + i];
    if (thread < GROUP) {
        highest[thread] = LEAST;
        total[thread] = 0;
    }
    float out[GROUP];
    for (int g = 0; g < GROUP; g++) out[g] = 0;
    int dim = thread % DIM, share = thread / DIM, warp = thread / WARP, lane = thread % WARP;
    __syncthreads();
    for (Long tile = first; tile < last; tile += TILES_AT_ONCE) {
        Long token = tile * KEY_TILE + thread;
        float scores[GROUP];
        for (int g = 0; g < GROUP; g++) scores[g] = 0;
        if (token < stop) {
            const float* column = keys + token / KEY_TILE * DIM * KEY_TILE + token % KEY_TILE;
#pragma unroll 8
            for (int d = 0; d < DIM; d++) {
                float key = column[d * KEY_TILE];
                for (int g = 0; g < GROUP; g++) scores[g] += query[g * DIM + d] * key;
            }
        }
        for (int g = 0; g < GROUP; g++) weights[g][thread] = token < stop ? scores[g] : LEAST;
        __syncthreads();
        for (int g = warp; g < GROUP; g += WARPS) {
            float top = highest[g], sum = 0;
            for (int i = lane; i < THREADS; i += WARP) top = fmaxf(top, weights[g][i]);
            top = warp_max(top);  // finite: a tile that is begun has a token
            for (int i = lane; i < THREADS; i += WARP) {
                float weight = expf(weights[g][i] - top);
                weights[g][i] = weight;
                sum += weight;
            }
            sum = warp_sum(sum);
            if (lane == 0) {
                rescale[g] = expf(highest[g] - top);
                total[g] = total[g] * rescale[g] + sum;
                highest[g] = top;
            }
        }
        __syncthreads();
        if (share < SHARES) {
            for (int g = 0; g < GROUP; g++) out[g] *= rescale[g];
            Long base = tile * KEY_TILE, count = min((Long)THREADS, stop - base);
#pragma unroll 4
            for (int i = share; i < count; i += SHARES) {
                float value = values[(base + i) * DIM + dim];
                for (int g = 0; g < GROUP; g++) out[g] += weights[g][i] * value;
            }
        }
        __syncthreads();
    }
    float* left = partial + ((((Long)row * kv_heads + head) * gridDim.x + split) * GROUP) * (DIM + 2);
    for (int g = 0; g < GROUP; g++, left += DIM + 2) {
        __syncthreads();
        sums[thread] = share < SHARES ? out[g] : 0;
        __syncthreads();
        if (thread < DIM) {
            float sum = 0;
            for (int i = thread; i < SHARES * DIM; i += DIM) sum += sums[i];
            left[thread] = sum;
        }
        if (thread == 0) {
            left[DIM] = highest[g];
            left[DIM + 1] = total[g];
        }
    }
}

// The splits of `attend` put together, into out [n, kv_heads * GROUP * DIM]: a block of DIM threads for each (query head, row).
extern "C" __global__ void combine(const float* partial, int kv_heads, int splits, float* out) {
    int head = blockIdx.x / GROUP, g = blockIdx.x % GROUP, row = blockIdx.y;
    const float* left = partial + ((((Long)row * kv_heads + head) * splits) * GROUP + g) * (DIM + 2);
    float top = LEAST, sum = 0, total = 0;
    for (int split = 0; split < splits; split++) top = fmaxf(top, left[split * GROUP * (DIM + 2) + DIM]);
    for (int split = 0; split < splits; split++) {
        const float* part = left + split * GROUP * (DIM + 2);
        float scale = expf(part[DIM] - top);  // 0 for a split beyond the sequence's end
        sum += part[threadIdx.x] * scale;
        total += part[DIM + 1] * scale;
    }
    out[((Long)row * kv_heads * GROUP + blockIdx.x) * DIM + threadIdx.x] = sum / total;
}
