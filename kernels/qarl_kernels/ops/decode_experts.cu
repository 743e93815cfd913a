// int4 experts on few rows each: out[i] = bf16(sum_k x[i / top_k, k] * bf16((code - 8) * scale)), times bf16(topk[i]).
//
// Weights are read in Marlin's order, in which 16 bytes are a lane's operands of four tensor-core instructions: they go
// from memory to registers without a detour. A block owns 64 columns of one expert and up to 8 of its rows. Its warps
// share K: each has a slice of its own, and the rows' part of it in shared memory that no other warp reads. So no warp
// waits for another until their sums are added, in the order of the warps.
//
// Constants from `decode_experts.py`: K, N, GROUP (codes per scale), WARPS, CHUNK (K-tiles of 16 that are in flight
// while others are multiplied), BLOCKS (resident on an SM).

typedef unsigned int u32;

#define ROWS 8
#define K_TILES (K / 16)
#define SLICE (K_TILES / WARPS)
#define SCALES (CHUNK * 16 / GROUP)
// Padded so that the 8 rows, or 4 pairs of columns, of a warp lie in different banks.
#define ROW_BYTES (SLICE * 32 + 16)
#define SUM_STRIDE 68

struct Chunk {
  uint4 codes[CHUNK];
  uint4 scales[SCALES];
};

__device__ __forceinline__ uint4 read_once(const uint4* from) {
  uint4 to;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(to.x), "=r"(to.y), "=r"(to.z), "=r"(to.w) : "l"(from));
  return to;
}

__device__ __forceinline__ void load(Chunk& chunk, const uint4* codes, const uint4* scales) {
#pragma unroll
  for (int k = 0; k < CHUNK; k++) chunk.codes[k] = read_once(codes + k * (N / 2));
#pragma unroll
  for (int group = 0; group < SCALES; group++) chunk.scales[group] = __ldg(scales + group * (N / 8));
}

// Two weights bf16((code - 8) * scale) of the codes at bits 0 and 16: 0x4300 is 128.0, whose last bits count ones.
__device__ __forceinline__ u32 weights(u32 codes, u32 scale) {
  u32 pair;
  asm("lop3.b32 %0, %1, 0x000f000f, 0x43004300, 0xea;" : "=r"(pair) : "r"(codes));
  asm("sub.rn.bf16x2 %0, %1, %2;" : "=r"(pair) : "r"(pair), "r"(0x43084308u));
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(pair) : "r"(pair), "r"(scale));
  return pair;
}

// sums[16 columns, 8 rows] += weights[16, 16] * x[16, 8]
__device__ __forceinline__ void multiply(float* sums, u32 word, u32 low, u32 high, u32 x0, u32 x1) {
  const u32 w0 = weights(word, low), w1 = weights(word >> 8, high);
  const u32 w2 = weights(word >> 4, low), w3 = weights(word >> 12, high);
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(w0), "r"(w1), "r"(w2), "r"(w3), "r"(x0), "r"(x1));
}

__device__ __forceinline__ void add_chunk(float (*sums)[4], const Chunk& chunk, const char* x) {
#pragma unroll
  for (int k = 0; k < CHUNK; k++) {
    const u32 x0 = *(const u32*)(x + k * 32), x1 = *(const u32*)(x + k * 32 + 16);
    const uint4 words = chunk.codes[k], scales = chunk.scales[k * 16 / GROUP];
    const u32 word[4] = {words.x, words.y, words.z, words.w}, pair[4] = {scales.x, scales.y, scales.z, scales.w};
#pragma unroll
    for (int part = 0; part < 4; part++) {
      const u32 low = __byte_perm(pair[part], 0, 0x1010), high = __byte_perm(pair[part], 0, 0x3232);
      multiply(sums[part], word[part], low, high, x0, x1);
    }
  }
}

__device__ __forceinline__ u32 rounded(float low, float high) {
  u32 pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

extern "C" __global__ void __launch_bounds__(WARPS * 32, BLOCKS)
    decode_experts(const uint4* codes, const uint4* scales, const uint4* x, u32* out, const int* sorted_rows,
                   const int* expert_of_block, const int* num_sorted, const float* topk, int num_rows, int top_k,
                   int weighted) {
  extern __shared__ char shared[];
  const int block = blockIdx.y, tile = blockIdx.x;
  if (block * ROWS >= *num_sorted) return;
  const long long expert = expert_of_block[block];
  if (expert < 0) return;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  codes += (expert * K_TILES + warp * SLICE) * (N / 2) + tile * 32 + lane;
  scales += (expert * (K / GROUP) + warp * (SLICE * 16 / GROUP)) * (N / 8) + tile * 8 + lane / 4;
  Chunk next;
  load(next, codes, scales);

  // Padding rows stay as they are: a row reaches its own sums alone, and nobody reads those of padding.
  const int lanes_row = sorted_rows[block * ROWS + lane % ROWS];
  char* own_x = shared + warp * (ROWS * ROW_BYTES);
#pragma unroll
  for (int at = lane; at < ROWS * SLICE * 2; at += 32) {
    const int row = __shfl_sync(0xffffffff, lanes_row, at / (SLICE * 2)), part = at % (SLICE * 2);
    if (row < num_rows)
      *(uint4*)(own_x + at / (SLICE * 2) * ROW_BYTES + part * 16) =
          x[(long long)(row / top_k) * (K / 8) + warp * (SLICE * 2) + part];
  }
  __syncwarp();

  float sums[4][4] = {};
  const char* lanes_x = own_x + lane / 4 * ROW_BYTES + lane % 4 * 4;
#pragma unroll
  for (int k = 0; k < SLICE; k += CHUNK) {
    const Chunk chunk = next;
    if (k + CHUNK < SLICE)
      load(next, codes + (k + CHUNK) * (N / 2), scales + (k + CHUNK) * 16 / GROUP * (N / 8));
    add_chunk(sums, chunk, lanes_x + k * 32);
  }

  float* all_sums = (float*)(shared + WARPS * ROWS * ROW_BYTES);
#pragma unroll
  for (int part = 0; part < 4; part++)
#pragma unroll
    for (int i = 0; i < 4; i++)
      all_sums[(warp * ROWS + lane % 4 * 2 + i % 2) * SUM_STRIDE + part * 16 + lane / 4 + i / 2 * 8] = sums[part][i];
  __syncthreads();
  for (int at = threadIdx.x; at < ROWS * 32; at += WARPS * 32) {
    const int row = sorted_rows[block * ROWS + at / 32], pair = at % 32;
    if (row >= num_rows) continue;
    float2 sum = {};
#pragma unroll
    for (int i = 0; i < WARPS; i++) {
      const float2 one = *(const float2*)(all_sums + (i * ROWS + at / 32) * SUM_STRIDE + pair * 2);
      sum.x += one.x, sum.y += one.y;
    }
    u32 result = rounded(sum.x, sum.y);
    if (weighted) asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(result) : "r"(result), "r"(rounded(topk[row], topk[row])));
    out[((long long)row * N + tile * 64) / 2 + pair] = result;
  }
}
