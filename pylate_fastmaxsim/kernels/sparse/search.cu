// Exact top-k of sparse inner products over postings in blocks of documents. launch.py says how the kernels follow each
// other and why no result is lost. Compiled at run time, with these numbers defined: DOCUMENTS, the documents of a block;
// THREADS, of a CTA of scan_blocks; BINS, of a histogram; BIN_SHIFT, which makes a bin of a sum; LARGEST, a bound on sums.
//
// A table holds the address of an array of each block. A candidate is a number of 64 bits: an integer sum of a document
// above its position. After rescore its score's bits stand above the inverted position, so that larger is better, and of
// equal scores the lower position.
typedef unsigned char uint8;
typedef unsigned short uint16;
typedef unsigned int uint32;
typedef unsigned long long uint64;
typedef long long int64;

#define ALL_LANES 0xffffffffu
// Terms of a query whose lists are walked at once; more are walked in turn.
#define TERMS 256
// Documents of a block above the threshold that are listed; if there are more, all are looked at again.
#define PLACES 2048
// Bits of a filter of terms.
#define FILTER 32768
// Numbers of float32 above 0.
#define SMALLEST 1.401298464324817e-45
#define GREATEST 3.4028234663852886e38

#ifndef EMULATED
#define DYNAMIC_SHARED(name) extern __shared__ __align__(16) int name[]
__device__ __forceinline__ float from_half(uint16 bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
}
#endif

// A sum that what rounds to `score` or more is sure to reach. All that is too large for float32 is infinite, and equal.
__device__ __forceinline__ double sum_of(double score, double unit) {
  return ((score < GREATEST ? score : GREATEST) * (1.0 - 4.8e-7) - SMALLEST) * unit - 1.0;
}

// One CTA, one query. The unit of a query's integer sums, such that they stay below LARGEST; the most that a sum can
// exceed the inner product by, in that unit; and the lowest sum that can reach `at_least`. The rest begins at 0.
extern "C" __global__ void __launch_bounds__(128) prepare_queries(
    const int64* __restrict__ offsets, const int* __restrict__ terms, const float* __restrict__ weights,
    const float* __restrict__ top_scales, const float* __restrict__ at_least, double* units, int* margins,
    int* thresholds, int* counts, int* lost, int* histograms, int* summary) {
  __shared__ double partial[128];
  const int query = blockIdx.x, thread = threadIdx.x;
  const int64 begin = offsets[query], end = offsets[query + 1];
  for (int i = thread; i < BINS; i += 128) histograms[query * BINS + i] = 0;
  double sum = 0.0;
  for (int64 i = begin + thread; i < end; i += 128) sum += (double)weights[i] * (double)top_scales[terms[i]];
  partial[thread] = sum;
  __syncthreads();
  for (int stride = 64; stride > 0; stride /= 2) {
    if (thread < stride) partial[thread] += partial[thread + stride];
    __syncthreads();
  }
  if (thread == 0) {
    const double count = (double)(end - begin), total = partial[0];
    const double unit = total > 0.0 ? (LARGEST / 255.0 - count) / total : 0.0;
    units[query] = unit;
    // A product of a query's factor, rounded up from x, and of an impact, rounded up from y <= 255, exceeds x * y by at
    // most x + 255. The rest covers that scores are rounded to float32: by 2^-24 of a score or, below 2^-126, by 2^-150.
    const double margin = 255.0 * count + total * unit + 512.0 + unit * SMALLEST;
    margins[query] = margin < LARGEST ? (int)margin : (int)LARGEST;
    const double lowest = at_least ? sum_of(at_least[query], unit) : 0.0;
    thresholds[query] = lowest > 1.0 ? (lowest < LARGEST ? (int)lowest : (int)LARGEST) : 1;
    counts[query] = lost[query] = 0;
    if (query == 0) summary[0] = summary[1] = 0;
  }
}

#define ADD(place, impact) atomicAdd(sums + (place), factor * (int)(impact))
// Eight postings: local numbers of documents of 16 bits, impacts of 8 bits.
__device__ __forceinline__ void add_unit(int* sums, uint4 documents, uint2 impacts, int factor) {
  ADD(documents.x & 0xffffu, impacts.x & 255u);
  ADD(documents.x >> 16, (impacts.x >> 8) & 255u);
  ADD(documents.y & 0xffffu, (impacts.x >> 16) & 255u);
  ADD(documents.y >> 16, impacts.x >> 24);
  ADD(documents.z & 0xffffu, impacts.y & 255u);
  ADD(documents.z >> 16, (impacts.y >> 8) & 255u);
  ADD(documents.w & 0xffffu, (impacts.y >> 16) & 255u);
  ADD(documents.w >> 16, impacts.y >> 24);
}

__device__ __forceinline__ int bin_of(int sum) {
  const int bin = sum >> BIN_SHIFT;
  return bin < BINS ? bin : BINS - 1;
}

// One CTA, one query, one block of documents: its integer sums in shared memory.
__device__ __forceinline__ void sum_block(
    int* sums, const uint16* ids, const uint8* impacts, const uint32* starts, const float* scales,
    const int64* offsets, const int* terms, const float* weights, double unit, int query) {
  // Lists follow each other in one count of units: first unit in memory less first unit of the count, end of the count.
  __shared__ uint32 distance[TERMS];
  __shared__ uint32 ends[TERMS];
  __shared__ int factors[TERMS];
  const int thread = threadIdx.x, lane = thread & 31, warp = thread >> 5;
  for (int i = thread; i < DOCUMENTS / 4; i += THREADS) ((int4*)sums)[i] = make_int4(0, 0, 0, 0);
  const int64 last = offsets[query + 1];
  for (int64 first = offsets[query]; first < last; first += TERMS) {
    const int count = last - first < TERMS ? (int)(last - first) : TERMS;
    __syncthreads();
    for (int i = thread; i < count; i += THREADS) {
      const int term = terms[first + i];
      const uint32 begin = starts[term];
      distance[i] = begin;
      ends[i] = starts[term + 1] - begin;
      factors[i] = (int)ceil((double)weights[first + i] * (double)scales[term] * unit);
    }
    __syncthreads();
    if (warp == 0) {
      uint32 running = 0;
      for (int base = 0; base < count; base += 32) {
        const int i = base + lane;
        const uint32 own = i < count ? ends[i] : 0u;
        uint32 through = own;
        for (int step = 1; step < 32; step <<= 1) {
          const uint32 before = __shfl_up_sync(ALL_LANES, through, step);
          if (lane >= step) through += before;
        }
        if (i < count) {
          ends[i] = running + through;
          distance[i] -= running + through - own;
        }
        running += __shfl_sync(ALL_LANES, through, 31);
      }
    }
    __syncthreads();
    // Each warp walks a stretch of its own, so that it meets few borders of lists.
    const uint32 total = ends[count - 1];
    const uint32 share = (total / 32 + THREADS / 32) / (THREADS / 32) * 32;
    uint32 stop = (warp + 1) * share;
    stop = stop < total ? stop : total;
    uint32 at = warp * share + lane;
    if (at < stop) {
      int list = 0;
      for (int width = TERMS / 2; width > 0; width /= 2)
        if (list + width <= count - 1 && ends[list + width - 1] <= at) list += width;
      uint32 end = ends[list], shift = distance[list];
      int factor = factors[list];
      for (; at < stop; at += 64) {
        while (at >= end) {
          list++;
          end = ends[list]; shift = distance[list]; factor = factors[list];
        }
        const uint4 documents = __ldg((const uint4*)ids + shift + at);
        const uint2 values = __ldg((const uint2*)impacts + shift + at);
        const uint32 next = at + 32;
        if (next < stop) {
          const int own = factor;
          while (next >= end) {
            list++;
            end = ends[list]; shift = distance[list]; factor = factors[list];
          }
          const uint4 next_documents = __ldg((const uint4*)ids + shift + next);
          const uint2 next_values = __ldg((const uint2*)impacts + shift + next);
          add_unit(sums, documents, values, own);
          add_unit(sums, next_documents, next_values, factor);
        } else {
          add_unit(sums, documents, values, factor);
        }
      }
    }
  }
  __syncthreads();
}

#define BLOCK_ARGUMENTS \
  const uint64* __restrict__ ids, const uint64* __restrict__ impacts, const uint64* __restrict__ starts, \
  const uint64* __restrict__ scales, const uint64* __restrict__ live, const int* __restrict__ blocks, \
  const int* __restrict__ queries, int query_count, const int64* __restrict__ offsets, const int* __restrict__ terms, \
  const float* __restrict__ weights, const double* __restrict__ units, const int* __restrict__ thresholds, int* histograms
#define SUM_BLOCK \
  DYNAMIC_SHARED(sums); \
  const int query = queries[blockIdx.x % query_count], block = blocks[blockIdx.x / query_count]; \
  sum_block(sums, (const uint16*)ids[block], (const uint8*)impacts[block], (const uint32*)starts[block], \
            (const float*)scales[block], offsets, terms, weights, units[query], query); \
  const uint8* alive = (const uint8*)live[block]; \
  const int threshold = thresholds[query]

// Sums of a query's documents in a block that reach the threshold go into its histogram.
extern "C" __global__ void __launch_bounds__(THREADS) count_blocks(BLOCK_ARGUMENTS) {
  SUM_BLOCK;
  // The histogram takes the place of the sums, which are kept in registers.
  int own[DOCUMENTS / THREADS];
#pragma unroll
  for (int i = 0; i < DOCUMENTS / THREADS; i++) own[i] = sums[i * THREADS + threadIdx.x];
  __syncthreads();
  for (int i = threadIdx.x; i < BINS; i += THREADS) sums[i] = 0;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < DOCUMENTS / THREADS; i++)
    if (own[i] >= threshold && (!alive || alive[i * THREADS + threadIdx.x])) atomicAdd(sums + bin_of(own[i]), 1);
  __syncthreads();
  for (int i = threadIdx.x; i < BINS; i += THREADS)
    if (sums[i]) atomicAdd(histograms + query * BINS + i, sums[i]);
}

// The same, and they become candidates; `counts` goes on beyond `capacity`, so that one sees that some were lost.
extern "C" __global__ void __launch_bounds__(THREADS) scan_blocks(
    BLOCK_ARGUMENTS, int* counts, uint64* candidates, int capacity) {
  __shared__ int found, first, taken;
  __shared__ uint16 places[PLACES];
  if (threadIdx.x == 0) found = taken = 0;  // sum_block waits for all threads
  SUM_BLOCK;
  for (int i = threadIdx.x; i < DOCUMENTS / 4; i += THREADS) {
    const int4 four = ((const int4*)sums)[i];
    if (max(max(four.x, four.y), max(four.z, four.w)) < threshold) continue;
    for (int place = 4 * i; place < 4 * i + 4; place++) {
      if (sums[place] < threshold) continue;
      const int slot = atomicAdd(&found, 1);
      if (slot < PLACES) places[slot] = place;
    }
  }
  __syncthreads();
  if (found == 0) return;
  // One step for all, since the threads of all blocks would wait for one another.
  if (threadIdx.x == 0) first = atomicAdd(counts + query, found);
  __syncthreads();
  const bool listed = found <= PLACES;
  for (int i = threadIdx.x; i < (listed ? found : DOCUMENTS); i += THREADS) {
    const int place = listed ? places[i] : i;
    int sum = sums[place];
    if (sum < threshold) continue;
    const int slot = first + (listed ? i : atomicAdd(&taken, 1));
    // A removed document has a slot as well, which its sum of 0 gives up again when the threshold is raised.
    if (alive && !alive[place]) sum = 0;
    else atomicAdd(histograms + query * BINS + bin_of(sum), 1);
    if (slot < capacity)
      candidates[(uint64)query * capacity + slot] = (uint64)sum << 32 | (uint32)(block * DOCUMENTS + place);
  }
}

// One CTA, one query. The threshold becomes the lower edge of the highest bin at or above which k documents were counted,
// less the margin, and never falls. Candidates below it are dropped. `lost` says whether the buffer ran over; `summary`
// gets the most candidates that a query has left, and whether any has lost some. With `restart` the histogram begins anew.
extern "C" __global__ void __launch_bounds__(1024) raise_thresholds(
    const int* __restrict__ queries, int* histograms, const double* __restrict__ units, const int* __restrict__ margins,
    int* thresholds, int* counts, uint64* candidates, int* lost, int* summary, int capacity, int k, int restart) {
  __shared__ int of_warps[32];
  __shared__ int kept, threshold;
  const int query = queries[blockIdx.x], thread = threadIdx.x, lane = thread & 31, warp = thread >> 5;
  int* histogram = histograms + query * BINS;
  if (thread == 0) {
    kept = 0;
    threshold = thresholds[query];
  }
  // Each thread has BINS / 1024 = 2 bins; how many documents lie in them and above.
  const int low = histogram[2 * thread], high = histogram[2 * thread + 1];
  int through = low + high;
  for (int step = 1; step < 32; step <<= 1) {
    const int more = __shfl_down_sync(ALL_LANES, through, step);
    if (lane + step < 32) through += more;
  }
  if (lane == 0) of_warps[warp] = through;
  __syncthreads();
  for (int i = warp + 1; i < 32; i++) through += of_warps[i];
  const int above = through - low - high;
  if (above < k && through >= k) {
    const int bin = 2 * thread + (above + high >= k);
    const double edge = (bin << BIN_SHIFT) - margins[query], ceiling = sum_of(GREATEST, units[query]);
    threshold = max(threshold, (int)(edge < ceiling ? edge : ceiling));
  }
  if (restart) histogram[2 * thread] = histogram[2 * thread + 1] = 0;
  __syncthreads();
  const int found = counts[query];
  const int count = found < capacity ? found : capacity;
  uint64* own = candidates + (uint64)query * capacity;
  for (int base = 0; base < count; base += 1024) {
    const uint64 candidate = base + thread < count ? own[base + thread] : 0;
    __syncthreads();
    // What is kept goes to places that have been read already.
    if ((int)(candidate >> 32) >= threshold) own[atomicAdd(&kept, 1)] = candidate;
    __syncthreads();
  }
  if (thread == 0) {
    thresholds[query] = threshold;
    counts[query] = kept;
    if (found > capacity) lost[query] = 1;
    atomicMax(summary, kept);
    if (lost[query]) summary[1] = 1;
  }
}

// One warp, one candidate: its inner product in float64, in the order of terms, rounded once. Places up to `width` that
// hold no candidate become 0.
extern "C" __global__ void __launch_bounds__(256) rescore(
    const int* __restrict__ queries, const int64* __restrict__ query_offsets, const int* __restrict__ query_terms,
    const float* __restrict__ query_weights, const uint64* __restrict__ row_offsets, const uint64* __restrict__ row_terms,
    const uint64* __restrict__ row_weights, const int* __restrict__ counts, uint64* candidates, int capacity, int width,
    int wide_terms, int wide_weights) {
  // Terms that the query may have. Few of a document's pass, so few are looked for.
  __shared__ uint32 filter[FILTER / 32];
  __shared__ int near_terms[TERMS];
  const int query = queries[blockIdx.y], lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int count = counts[query];
  const int64 begin = query_offsets[query];
  const int length = (int)(query_offsets[query + 1] - begin);
  const int* sought = length <= TERMS ? near_terms : query_terms + begin;
  for (int i = threadIdx.x; i < FILTER / 32; i += 256) filter[i] = 0;
  __syncthreads();
  for (int i = threadIdx.x; i < length; i += 256) {
    const int term = query_terms[begin + i];
    const uint32 bit = (uint32)term % FILTER;
    atomicOr(filter + bit / 32, 1u << bit % 32);
    if (i < TERMS) near_terms[i] = term;
  }
  __syncthreads();
  for (int i = blockIdx.x * 8 + warp; i < width; i += gridDim.x * 8) {
    uint64* candidate = candidates + (uint64)query * capacity + i;
    if (i >= count) {
      if (lane == 0) *candidate = 0;
      continue;
    }
    const uint32 position = (uint32)*candidate;
    const int block = position / DOCUMENTS, place = position % DOCUMENTS;
    const int64* offsets = (const int64*)row_offsets[block];
    const uint64 terms = row_terms[block], weights = row_weights[block];
    const int64 end = offsets[place + 1];
    double sum = 0.0;
    // Four terms of a lane at once, so that it waits for memory once.
    for (int64 first = offsets[place] + lane; first - lane < end; first += 128) {
      int own[4];
      double products[4];
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const int64 at = first + 32 * j;
        own[j] = at >= end ? -1 : wide_terms ? ((const int*)terms)[at] : (int)((const uint16*)terms)[at];
      }
#pragma unroll
      for (int j = 0; j < 4; j++) {
        products[j] = 0.0;
        const uint32 bit = (uint32)own[j] % FILTER;
        if (own[j] < 0 || !(filter[bit / 32] >> bit % 32 & 1u)) continue;
        int low = 0, high = length;
        while (low < high) {
          const int middle = (low + high) / 2;
          if (sought[middle] < own[j]) low = middle + 1;
          else high = middle;
        }
        const int64 at = first + 32 * j;
        if (low < length && sought[low] == own[j])
          products[j] = (double)query_weights[begin + low] *
                        (double)(wide_weights ? ((const float*)weights)[at] : from_half(((const uint16*)weights)[at]));
      }
#pragma unroll
      for (int j = 0; j < 4; j++) {
        uint32 shared = __ballot_sync(ALL_LANES, products[j] != 0.0);
        while (shared) {
          sum += __shfl_sync(ALL_LANES, products[j], __ffs(shared) - 1);
          shared &= shared - 1;
        }
      }
    }
    if (lane == 0) *candidate = (uint64)__float_as_uint((float)sum) << 32 | (0xffffffffu - position);
  }
}

// Keys of the best documents, `width` of each query, as scores and positions; 0 and -1 where there is none.
extern "C" __global__ void __launch_bounds__(256) unpack(
    const uint64* __restrict__ keys, float* scores, int64* positions, int width, int k, int count) {
  const int64 i = (int64)blockIdx.x * 256 + threadIdx.x;
  if (i >= (int64)count * k) return;
  const int64 query = i / k, place = i % k;
  const uint64 key = place < width ? keys[query * width + place] : 0;
  scores[i] = __uint_as_float((uint32)(key >> 32));
  positions[i] = key ? (int64)(0xffffffffu - (uint32)key) : -1;
}
