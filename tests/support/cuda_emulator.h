// Runs CUDA C++ on a CPU: a thread of a block is a fiber, which goes on to the next barrier or warp operation in its turn.
// Included before a kernel file that asks for EMULATED. What it does not have does not compile.
#pragma once
#define EMULATED 1
#include <math.h>
#include <setjmp.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#include <tuple>
#include <utility>
#include <vector>

#define __global__
#define __device__
#define __forceinline__ inline
#define __restrict__
#define __launch_bounds__(...)
#define __shared__ static  // blocks run one after the other

struct Place { int x, y, z; };
struct int4 { int x, y, z, w; };
struct uint4 { unsigned x, y, z, w; };
struct uint2 { unsigned x, y; };
static inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }

struct Fiber { ucontext_t context; jmp_buf at; Place place; bool begun, done; std::vector<char> stack; };
struct Warp { uint64_t values[2][32]; int arrived, turn; };
static std::vector<Fiber> fibers;
static std::vector<Warp> warps;
static Fiber* current;
static jmp_buf scheduler;
static int at_barrier, barrier_turn;
static Place blockIdx, gridDim;
static char dynamic_shared[1 << 18];
#define threadIdx (current->place)
#define DYNAMIC_SHARED(name) int* name = (int*)dynamic_shared

// Not swapcontext, which calls the system each time.
static void give_way() { if (!_setjmp(current->at)) _longjmp(scheduler, 1); }
static void go_on(Fiber& fiber) {
  current = &fiber;
  if (_setjmp(scheduler)) return;
  if (fiber.begun) _longjmp(fiber.at, 1);
  fiber.begun = true;
  setcontext(&fiber.context);
}

static void __syncthreads() {
  const int turn = barrier_turn;
  if (++at_barrier == (int)fibers.size()) { at_barrier = 0; barrier_turn++; }
  else while (barrier_turn == turn) give_way();
}

// All lanes hand in a value and see those of the others.
static uint64_t* exchanged(uint64_t value) {
  const int thread = current->place.x;
  Warp& warp = warps[thread / 32];
  const int turn = warp.turn;
  warp.values[turn & 1][thread & 31] = value;
  if (++warp.arrived == 32) { warp.arrived = 0; warp.turn++; }
  else while (warps[thread / 32].turn == turn) give_way();
  return warps[thread / 32].values[turn & 1];
}
template <class T> static uint64_t to_bits(T value) { uint64_t bits = 0; memcpy(&bits, &value, sizeof value); return bits; }
template <class T> static T from_bits(uint64_t bits) { T value; memcpy(&value, &bits, sizeof value); return value; }
template <class T> static T __shfl_sync(unsigned, T value, int lane) { return from_bits<T>(exchanged(to_bits(value))[lane & 31]); }
template <class T> static T __shfl_up_sync(unsigned, T value, int step) {
  const int lane = current->place.x & 31;
  const uint64_t* all = exchanged(to_bits(value));
  return lane >= step ? from_bits<T>(all[lane - step]) : value;
}
template <class T> static T __shfl_down_sync(unsigned, T value, int step) {
  const int lane = current->place.x & 31;
  const uint64_t* all = exchanged(to_bits(value));
  return lane + step < 32 ? from_bits<T>(all[lane + step]) : value;
}
static unsigned __ballot_sync(unsigned, bool vote) {
  const uint64_t* all = exchanged(vote);
  unsigned votes = 0;
  for (int lane = 0; lane < 32; lane++) votes |= (unsigned)(all[lane] != 0) << lane;
  return votes;
}

static int __ffs(unsigned x) { return __builtin_ffs(x); }
template <class T> static T max(T a, T b) { return a > b ? a : b; }
template <class T> static T atomicAdd(T* place, T value) { const T old = *place; *place = old + value; return old; }
static void atomicMax(int* place, int value) { if (value > *place) *place = value; }
static void atomicOr(unsigned* place, unsigned bits) { *place |= bits; }
template <class T> static T __ldg(const T* place) { return *place; }
static float __uint_as_float(unsigned bits) { float x; memcpy(&x, &bits, 4); return x; }
static unsigned __float_as_uint(float x) { unsigned bits; memcpy(&bits, &x, 4); return bits; }
static float from_half(unsigned short bits) { _Float16 x; memcpy(&x, &bits, 2); return (float)x; }

struct Kernel { virtual void run() = 0; };
static Kernel* running;
static void enter() { running->run(); current->done = true; give_way(); }

template <class... A> struct Call : Kernel {
  void (*kernel)(A...);
  const uint64_t* slots;
  Call(void (*kernel)(A...), const uint64_t* slots) : kernel(kernel), slots(slots) {}
  template <size_t... I> void call(std::index_sequence<I...>) { kernel(from_bits<A>(slots[I])...); }
  void run() override { call(std::make_index_sequence<sizeof...(A)>{}); }
};

template <class... A> static void run_blocks(void (*kernel)(A...), int grid_x, int grid_y, int threads, const uint64_t* slots) {
  Call<A...> call(kernel, slots);
  running = &call;
  gridDim = {grid_x, grid_y, 1};
  fibers.resize(threads);
  for (int y = 0; y < grid_y; y++) for (int x = 0; x < grid_x; x++) {
    blockIdx = {x, y, 0};
    at_barrier = 0;
    warps.assign((threads + 31) / 32, Warp{});
    memset(dynamic_shared, 0x5a, sizeof dynamic_shared);  // as it is on a GPU: not zero
    for (int thread = 0; thread < threads; thread++) {
      Fiber& fiber = fibers[thread];
      fiber.begun = fiber.done = false;
      fiber.place = {thread, 0, 0};
      fiber.stack.resize(1 << 16);
      getcontext(&fiber.context);
      fiber.context.uc_stack.ss_sp = fiber.stack.data();
      fiber.context.uc_stack.ss_size = fiber.stack.size();
      fiber.context.uc_link = nullptr;
      makecontext(&fiber.context, enter, 0);
    }
    for (bool live = true; live;) {
      live = false;
      for (auto& fiber : fibers) if (!fiber.done) { live = true; go_on(fiber); }
    }
  }
}
