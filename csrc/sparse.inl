// Rows of d logits with few entries, and sums of a matrix's rows over such entries: grpo_kernels/backends/sparse.py says
// what is computed. Most blocks of a row have no entry, and are passed over without a look at their numbers one by one.

constexpr int kEntryBlock = 128;
constexpr double kFloor = 1e-15;

// As many 32-bit numbers as a Vector<T> has numbers.
template <class T>
using Lanes = typename VectorOf<uint32_t, 4 * kWidth<T>>::type;
template <class T>
using Choice = typename VectorOf<int32_t, 4 * kWidth<T>>::type;  // -1: chosen, 0: not

// The numbers from `start` on; 0 beyond the row's end. PLAIN: rows of T.
template <class T, bool PLAIN>
INLINE Vector<T> numbers(const SparseRow& row, int64_t start) {
  const Dtype dtype = PLAIN ? kDtype<T> : row.dtype;
  return load_some<T>(static_cast<const char*>(row.g) + start * size_of(dtype), dtype, count_at<T>(start, row.size));
}

template <class T>
INLINE T sum_of(Vector<T> x) {
  T sum = 0;
  for (int i = 0; i < kWidth<T>; ++i) sum += x[i];
  return sum;
}

// The largest |g|; NaN if one is not finite.
template <class T, bool PLAIN>
T largest(const SparseRow& row) {
  Vector<T> top{}, odd{};
  for (int64_t start = 0; start < row.size; start += kWidth<T>) {
    const Vector<T> x = numbers<T, PLAIN>(row, start);
    top = larger(magnitude(x), top);
    odd += x - x;
  }
  T found = 0;
  for (int i = 0; i < kWidth<T>; ++i) found = top[i] > found ? top[i] : found;
  return found + sum_of<T>(odd);
}

// The entries of a row that CHOOSER takes: it is asked for a vector of places at a time.
template <class T, bool PLAIN, class CHOOSER>
INLINE void collect(const SparseRow& row, CHOOSER& chooser, Found<T>& found) {
  Choice<T> chosen[kEntryBlock / kWidth<T>];
  for (int64_t block = 0; block < row.size; block += kEntryBlock) {
    const int64_t stop = row.size - block < kEntryBlock ? row.size : block + kEntryBlock;
    Choice<T> any{};
    int part = 0;
    for (int64_t start = block; start < stop; start += kWidth<T>) {
      chosen[part] = chooser.choose(magnitude(numbers<T, PLAIN>(row, start)), start);
      any |= chosen[part++];
    }
    uint64_t words[sizeof any / 8], word = 0;
    std::memcpy(words, &any, sizeof any);
    for (uint64_t x : words) word |= x;
    if (word == 0) continue;
    for (int64_t start = block; start < stop; start += kWidth<T>) {
      const Choice<T> here = chosen[(start - block) / kWidth<T>];
      const Vector<T> x = numbers<T, PLAIN>(row, start);
      for (int i = 0; i < kWidth<T>; ++i) {
        if (here[i]) found.add(start + i, chooser.value(x[i]));
      }
    }
  }
}

template <class T>
struct Certain {
  T inverse;

  INLINE_MEMBER Choice<T> choose(Vector<T> size, int64_t) const {
    return __builtin_convertvector(size * inverse >= T(kCertainStep), Choice<T>);
  }
  T value(T x) const { return x; }
};

template <class T, bool PLAIN>
void certain(const SparseRow& row, T top, Found<T>& found) {
  Certain<T> chooser{T(1) / top};
  collect<T, PLAIN>(row, chooser, found);
}

// Of each threshold: sum of max(r |w|^2 - r^2 |w|^2 2^k, 0), by 2^k. For r^2 not to be too small a number, which would
// take a hundred times as long, r is kFloor there at least; that is a change by 1e-9 at most.
template <class T, bool PLAIN>
void errors(const SparseRow& row, const T* norms, T top, T* out) {
  const T inverse = T(1) / top;
  double totals[kSteps] = {};
  for (int64_t tile = 0; tile < row.size; tile += kTile) {
    const int64_t stop = row.size - tile < kTile ? row.size : tile + kTile;
    for (int64_t lane = 0; lane < kLanes; lane += kWidth<T>) {
      Vector<T> sums[kSteps] = {};
      for (int64_t start = tile + lane; start < stop; start += kLanes) {
        const Vector<T> r = magnitude(numbers<T, PLAIN>(row, start)) * inverse;
        const Vector<T> whole = r * load_some<T>(norms + start, kDtype<T>, count_at<T>(start, row.size));
        Vector<T> lost = whole * (larger(r, splat<Vector<T>>(T(kFloor))) * T(1 << kCertain));
#pragma GCC unroll 16
        for (int k = 0; k < kSteps; ++k) {
          sums[k] += larger(whole - lost, Vector<T>{});
          lost += lost;
        }
      }
#pragma GCC unroll 16
      for (int k = 0; k < kSteps; ++k) add_to<T>(totals[k], sums[k]);
    }
  }
  for (int k = 0; k < kSteps; ++k) out[k] = static_cast<T>(totals[k] / (1 << (kCertain + k)));
}

// What is not certain: drawn, from tau on with a chance of 1.
template <class T>
struct Drawn {
  T inverse, tau, scale, smallest;  // 1 / top, 2^-k, 2^k, tau in the numbers' own unit
  uint32_t low, high, first;        // of the key, and the first column
  Lanes<T> steps{};                 // what the columns of a vector add to the first one's
  Vector<T> expected{}, spread{};

  INLINE_MEMBER Choice<T> choose(Vector<T> size, int64_t start) {
    Vector<T> r = size * inverse;
    r = r < T(kCertainStep) ? r : Vector<T>{};
    Vector<T> chance = r * scale;
    chance = chance < T(1) ? chance : splat<Vector<T>>(T(1));
    expected += chance, spread += r * (T(1) - chance);
    Lanes<T> x = (steps + (static_cast<uint32_t>(start) + first) * 0x9E3779B1u) ^ low;  // murmur3's finaliser
    x = ((x ^ (x >> 16)) * 0x85EBCA6Bu) ^ high;
    x = (x ^ (x >> 13)) * 0xC2B2AE35u;
    const Lanes<T> draw = (x ^ (x >> 16)) >> 2;
    return bits<Choice<T>>(draw) < __builtin_convertvector(chance * T(0x1p30), Choice<T>);
  }
  T value(T x) const { return std::fabs(x) * inverse >= tau ? x : std::copysign(smallest, x); }
};

template <class T, bool PLAIN>
void thin(const SparseRow& row, const Threshold<T>& at, Found<T>& found, T& expected, T& spread) {
  expected = spread = T(0);
  if (at.k == 0) return;
  const T scale = static_cast<T>(int64_t{1} << at.k), tau = T(1) / scale;
  const uint32_t low = static_cast<uint32_t>(at.key), high = static_cast<uint32_t>(at.key >> 32);
  Drawn<T> chooser{T(1) / at.top, tau, scale, at.top * tau, low, high, static_cast<uint32_t>(at.first_id)};
  for (int i = 0; i < kWidth<T>; ++i) chooser.steps[i] = i * 0x9E3779B1u;
  collect<T, PLAIN>(row, chooser, found);
  expected = sum_of<T>(chooser.expected);
  spread = sum_of<T>(chooser.spread) * tau;
}

// out[h] += value * x[h]; `next` is the row that will come after x.
template <class T, bool PLAIN>
void add_scaled(T value, const SparseRow& x, const void* next, T* out) {
  for (int64_t start = 0; start < x.size; start += kWidth<T>) {
    __builtin_prefetch(static_cast<const char*>(next) + start * size_of(x.dtype));
    const int count = count_at<T>(start, x.size);
    const Vector<T> sum = load_some<T>(out + start, kDtype<T>, count) + numbers<T, PLAIN>(x, start) * value;
    store_some<T>(out + start, kDtype<T>, sum, count);
  }
}

template <class T>
T largest_any(const SparseRow& row) {
  return row.dtype == kDtype<T> ? largest<T, true>(row) : largest<T, false>(row);
}
template <class T>
void certain_any(const SparseRow& row, T top, Found<T>& found) {
  row.dtype == kDtype<T> ? certain<T, true>(row, top, found) : certain<T, false>(row, top, found);
}
template <class T>
void errors_any(const SparseRow& row, const T* norms, T top, T* out) {
  row.dtype == kDtype<T> ? errors<T, true>(row, norms, top, out) : errors<T, false>(row, norms, top, out);
}
template <class T>
void thin_any(const SparseRow& row, const Threshold<T>& at, Found<T>& found, T& expected, T& spread) {
  row.dtype == kDtype<T> ? thin<T, true>(row, at, found, expected, spread)
                         : thin<T, false>(row, at, found, expected, spread);
}
template <class T>
void add_scaled_any(T value, const SparseRow& x, const void* next, T* out) {
  x.dtype == kDtype<T> ? add_scaled<T, true>(value, x, next, out) : add_scaled<T, false>(value, x, next, out);
}
