// int4 linear layer on few rows: out[m] = bf16(sum_k x[m, k] * bf16((code - 8) * scale)), m < num_rows <= ROWS.
//
// Weights are read in Marlin's order, in which 16 bytes are a lane's operands of four tensor-core instructions. A block
// owns TILES times 64 columns. K is divided between the blocks of a cluster, and between a block's slices, of TILES
// warps each. All that a warp reads is on its way to shared memory before it waits for anything: of loads to registers,
// the compiler delays most. No other slice reads a slice's part, so slices wait for each other only once their sums are
// there. These are added in the order of the slices, then in that of the blocks: a block sends each other block of its
// cluster the sums of the rows that the other one adds up. The stores count themselves at the receiver: no fence.
//
// Constants from `decode_linear.py`: K, N, GROUP (codes per scale), ROWS (8, 16 or 32), WARPS, TILES, CLUSTER, CHUNK (K-tiles
// of 16 that a warp waits for at a time, a quarter of its own or more), BLOCKS (resident on an SM).

typedef unsigned int u32;

#define SLICES (WARPS / TILES)
// In K-tiles of 16; may be a part of a group.
#define SLICE (K / 16 / (CLUSTER * SLICES))
#define SCALES ((SLICE * 16 + GROUP - 1) / GROUP)
// Padded so that 8 rows, or 4 pairs of rows of sums, lie in different banks.
#define ROW_BYTES (SLICE * 32 + 16)
#define SUM_STRIDE 68
#define TILE_SUMS (ROWS * SUM_STRIDE)
// A slice's x, its warps' codes and their scales; later its sums.
#define WARP_BYTES (SLICE * 512 + SCALES * 128)
#define PART_BYTES (ROWS * ROW_BYTES + TILES * WARP_BYTES)
#define SLICE_BYTES (PART_BYTES > TILES * TILE_SUMS * 4 ? PART_BYTES : TILES * TILE_SUMS * 4)
// Four columns each.
#define QUADS (TILES * 16)
#if CLUSTER > 1
#define CLUSTERED __attribute__((cluster_dims(1, CLUSTER, 1)))
#else
#define CLUSTERED
#endif

__device__ __forceinline__ u32 address(const void* at) { return (u32)__cvta_generic_to_shared(at); }

__device__ __forceinline__ void copy_async(char* to, const uint4* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" : : "r"(address(to)), "l"(from) : "memory");
}

// Waits for the warps that share a slice of K.
__device__ __forceinline__ void sync_slice(int slice) {
  if (TILES == 1)
    __syncwarp();
  else
    asm volatile("bar.sync %0, %1;" : : "r"(slice + 1), "n"(TILES * 32) : "memory");
}

// Waits for all but the last `left` groups of this lane's copies.
__device__ __forceinline__ void wait_for_copies(int left) {
  if (left == 0) asm volatile("cp.async.wait_group 0;" : : : "memory");
  if (left == 1) asm volatile("cp.async.wait_group 1;" : : : "memory");
  if (left == 2) asm volatile("cp.async.wait_group 2;" : : : "memory");
  if (left == 3) asm volatile("cp.async.wait_group 3;" : : : "memory");
}

// x[16, 8] for 16 rows, or for 8: two registers for each 8. Each lane has the address of 16 bytes.
__device__ __forceinline__ void load_rows(u32* x, u32 from) {
#if ROWS == 8
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
               : "=r"(x[0]), "=r"(x[1]) : "r"(from) : "memory");
#else
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(from) : "memory");
#endif
}

// Two weights bf16((code - 8) * scale) of the codes at bits 0 and 16: 0x4300 is 128.0, whose last bits count ones.
__device__ __forceinline__ u32 weights(u32 codes, u32 scale) {
  u32 pair;
  asm("lop3.b32 %0, %1, 0x000f000f, 0x43004300, 0xea;" : "=r"(pair) : "r"(codes));
  asm("sub.rn.bf16x2 %0, %1, %2;" : "=r"(pair) : "r"(pair), "r"(0x43084308u));
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(pair) : "r"(pair), "r"(scale));
  return pair;
}

// sums[16 columns, 8 rows] += w[16, 16] * x[16, 8]
__device__ __forceinline__ void multiply(float* sums, const u32* w, const u32* x) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3]), "r"(x[0]), "r"(x[1]));
}

// Adds four sums each of `count` slices or blocks, in their order.
__device__ __forceinline__ float4 add_in_order(const char* from, int count, int stride) {
  float4 sum = *(const float4*)from;
#pragma unroll
  for (int i = 1; i < count; i++) {
    const float4 one = *(const float4*)(from + i * stride);
    sum.x += one.x, sum.y += one.y, sum.z += one.z, sum.w += one.w;
  }
  return sum;
}

__device__ __forceinline__ uint2 rounded(float4 sum) {
  uint2 to;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(to.x) : "f"(sum.y), "f"(sum.x));
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(to.y) : "f"(sum.w), "f"(sum.z));
  return to;
}

// The barrier is passed once `bytes` have come. Its owner lets the others of the cluster know that it is ready.
__device__ __forceinline__ void expect(u32 barrier, u32 bytes) {
  if (threadIdx.x == 0)
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1; fence.mbarrier_init.release.cluster; "
                 "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" : : "r"(barrier), "r"(bytes) : "memory");
  __syncwarp();
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" : : : "memory");
}

__device__ __forceinline__ void send(u32 to, u32 barrier, int block, float4 sum) {
  asm volatile("{ .reg .u32 a, b; mapa.shared::cluster.u32 a, %0, %2; mapa.shared::cluster.u32 b, %1, %2; "
               "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [a], {%3, %4, %5, %6}, [b]; }"
               : : "r"(to), "r"(barrier), "r"(block), "f"(sum.x), "f"(sum.y), "f"(sum.z), "f"(sum.w) : "memory");
}

__device__ __forceinline__ void receive(u32 barrier) {
  asm volatile("{ .reg .pred p; again: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%0], 0; "
               "@!p bra again; }" : : "r"(barrier) : "memory");
}

extern "C" __global__ void __launch_bounds__(WARPS * 32, BLOCKS) CLUSTERED
    decode_linear(const uint4* codes, const uint4* scales, const uint4* x, uint2* out, int num_rows) {
  extern __shared__ __align__(16) char shared[];
  char* received = shared + SLICES * SLICE_BYTES;
  const u32 barrier = address(received + ROWS * QUADS * 16);
  const int block = blockIdx.y, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (CLUSTER > 1) expect(barrier, (num_rows + CLUSTER - 1 - block) / CLUSTER * (CLUSTER * QUADS * 16));

  const int slice = warp / TILES, tile = warp % TILES, first = (block * SLICES + slice) * SLICE;
  codes += (long long)first * (N / 2) + (blockIdx.x * TILES + tile) * 32 + lane;
  scales += first * 16 / GROUP * (N / 8) + (blockIdx.x * TILES + tile) * 8;
  x += first * 2;
  char* own = shared + slice * SLICE_BYTES;
  char* own_codes = own + ROWS * ROW_BYTES + tile * WARP_BYTES + lane * 16;
  char* own_scales = own + ROWS * ROW_BYTES + tile * WARP_BYTES + SLICE * 512;
  for (int at = lane; at < SCALES * 8; at += 32) copy_async(own_scales + at * 16, scales + at / 8 * (N / 8) + at % 8);
#pragma unroll
  for (int from = 0; from < SLICE; from += CHUNK) {
#pragma unroll
    for (int k = from; k < from + CHUNK; k++) copy_async(own_codes + k * 512, codes + k * (N / 2));
    // Rows from num_rows on stay as they are: a row reaches its own sums alone, and nobody reads those.
#pragma unroll
    for (int at = lane + tile * 32; at < ROWS * CHUNK * 2; at += TILES * 32) {
      const int row = at / (CHUNK * 2), part = from * 2 + at % (CHUNK * 2);
      if (row < num_rows) copy_async(own + row * ROW_BYTES + part * 16, x + row * (K / 8) + part);
    }
    asm volatile("cp.async.commit_group;" : : : "memory");
  }
  if (CLUSTER > 1) asm volatile("barrier.cluster.wait.aligned;" : : : "memory");

  float sums[4][ROWS / 8][4] = {};
  const u32 lanes_x = address(own + (lane / 16 * 8 + lane % 8) * ROW_BYTES + lane / 8 % 2 * 16);
#pragma unroll
  for (int k = 0; k < SLICE; k++) {
    if (k % CHUNK == 0) wait_for_copies(SLICE / CHUNK - 1 - k / CHUNK), sync_slice(slice);
    u32 rows[ROWS / 8][2];
#pragma unroll
    for (int i = 0; i < ROWS / 8; i += 2) load_rows(rows[i], lanes_x + i * 8 * ROW_BYTES + k * 32);
    const uint4 words = *(const uint4*)(own_codes + k * 512);
    const uint4 pairs = *(const uint4*)(own_scales + k * 16 / GROUP * 128 + lane / 4 * 16);
    const u32 word[4] = {words.x, words.y, words.z, words.w}, pair[4] = {pairs.x, pairs.y, pairs.z, pairs.w};
#pragma unroll
    for (int part = 0; part < 4; part++) {
      const u32 low = __byte_perm(pair[part], 0, 0x1010), high = __byte_perm(pair[part], 0, 0x3232);
      const u32 w[4] = {weights(word[part], low), weights(word[part] >> 8, high), weights(word[part] >> 4, low),
                        weights(word[part] >> 12, high)};
#pragma unroll
      for (int i = 0; i < ROWS / 8; i++) multiply(sums[part][i], w, rows[i]);
    }
  }

  sync_slice(slice);
  float* own_sums = (float*)own + tile * TILE_SUMS;
#pragma unroll
  for (int at = 0; at < ROWS * 2; at++) {
    const int part = at / (ROWS / 2), i = at / 4 % (ROWS / 8), row = i * 8 + lane % 4 * 2 + at % 2;
    own_sums[row * SUM_STRIDE + part * 16 + lane / 4 + at / 2 % 2 * 8] = sums[part][i][at % 4];
  }
  __syncthreads();
  out += blockIdx.x * QUADS;
  for (int at = threadIdx.x; at < num_rows * QUADS; at += WARPS * 32) {
    const int row = at / QUADS, quad = at % QUADS, to = (block * (ROWS / CLUSTER) + row / CLUSTER) * QUADS + quad;
    const char* from = shared + (quad / 16 * TILE_SUMS + row * SUM_STRIDE + quad % 16 * 4) * 4;
    const float4 sum = add_in_order(from, SLICES, SLICE_BYTES);
    if (CLUSTER > 1)
      send(address(received + to * 16), barrier, row % CLUSTER, sum);
    else
      out[row * (N / 4) + quad] = rounded(sum);
  }
  if (CLUSTER == 1) return;
  receive(barrier);
  for (int at = threadIdx.x; at / QUADS * CLUSTER + block < num_rows; at += WARPS * 32)
    out[(at / QUADS * CLUSTER + block) * (N / 4) + at % QUADS] =
        rounded(add_in_order(received + at * 16, CLUSTER, ROWS / CLUSTER * QUADS * 16));
}
