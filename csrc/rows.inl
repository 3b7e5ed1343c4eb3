// The row kernels: sums over a row of logits, and the gradient in the raw logits. Included once for each instruction
// set (kernels.inl). The elements of a row belong to 32 lanes in turn. Lanes are summed apart, a tile at a time; then
// they are added up in double, one after the other. So the bits of a row depend on the row alone.

constexpr int kLanes = 32;
constexpr int64_t kTile = 128 * kLanes;  // sums in T have 128 terms

template <class T>
constexpr Dtype kDtype = sizeof(T) == 4 ? Dtype::f32 : Dtype::f64;

// The number of elements from `start` on, one vector's at most.
template <class T>
INLINE int count_at(int64_t start, int64_t size) {
  return size - start < kWidth<T> ? static_cast<int>(size - start) : kWidth<T>;
}

// v, with x in the lanes from `count` on.
template <class T>
INLINE Vector<T> filled(Vector<T> v, int count, float x) {
  for (int i = count; i < kWidth<T>; ++i) v[i] = x;
  return v;
}

// round(x + bias) of `count` numbers from `start` on. PLAIN: rows of T, without bias, rounding or soft-cap.
template <class T, bool PLAIN>
INLINE Vector<T> biased(const Row<T>& row, int64_t start, int count) {
  if constexpr (PLAIN) return load_some<T>(static_cast<const T*>(row.x) + start, kDtype<T>, count);
  Vector<T> x = load_some<T>(static_cast<const char*>(row.x) + start * size_of(row.dtype), row.dtype, count);
  if (row.bias != nullptr) x += load_some<T>(row.bias + start, kDtype<T>, count);
  if constexpr (sizeof(T) == 4) {
    if (row.rounds) x = rounded_to(x, row.rounded_to);
  }
  return x;
}

template <class T, bool PLAIN>
INLINE Vector<T> scaled(const Row<T>& row, Vector<T> x) {
  const Vector<T> z = x * row.inner;
  return !PLAIN && row.has_softcap ? tanh(z) * row.outer : z;
}

// d z / d x
template <class T, bool PLAIN>
INLINE Vector<T> slope(const Row<T>& row, Vector<T> x) {
  if (PLAIN || !row.has_softcap) return splat<Vector<T>>(row.inner);
  return tanh_slope(x * row.inner) * (row.inner * row.outer);
}

// The scaled logits from `start` on; -inf beyond the row's end.
template <class T, bool PLAIN>
INLINE Vector<T> scaled_at(const Row<T>& row, int64_t start) {
  const int count = count_at<T>(start, row.size);
  return filled<T>(scaled<T, PLAIN>(row, biased<T, PLAIN>(row, start, count)), count, -INFINITY);
}

// The largest logit that is not NaN, and its first place (0 if there is none).
template <class T, bool PLAIN>
void find_max(const Row<T>& row, T& max, int64_t& argmax) {
  int64_t tile_of_max = 0;
  max = -INFINITY;
  for (int64_t tile = 0; tile < row.size; tile += kTile) {
    const int64_t stop = row.size - tile < kTile ? row.size : tile + kTile;
    Vector<T> tops = splat<Vector<T>>(T(-INFINITY));
    for (int64_t start = tile; start < stop; start += kWidth<T>) tops = larger(scaled_at<T, PLAIN>(row, start), tops);
    for (int i = 0; i < kWidth<T>; ++i) {
      if (tops[i] > max) max = tops[i], tile_of_max = tile;
    }
  }
  max += T(0);  // 0 and -0 tie: it is 0, whichever came first
  argmax = 0;
  for (int64_t start = tile_of_max; start < row.size; start += kWidth<T>) {
    const Vector<T> z = scaled_at<T, PLAIN>(row, start);
    for (int i = 0; i < count_at<T>(start, row.size); ++i) {
      if (z[i] == max) {
        argmax = start + i;
        return;
      }
    }
  }
}

// total += each of v, in the order of the lanes
template <class T>
INLINE void add_to(double& total, Vector<T> v) {
  for (int i = 0; i < kWidth<T>; ++i) total += v[i];
}

template <class T, bool PLAIN>
bool has_nan(const Row<T>& row) {
  for (int64_t start = 0; start < row.size; start += kWidth<T>) {
    const Vector<T> z = scaled_at<T, PLAIN>(row, start);
    for (int i = 0; i < kWidth<T>; ++i) {
      if (z[i] != z[i]) return true;
    }
  }
  return false;
}

template <class T, bool PLAIN>
void reduce(const Row<T>& row, int64_t target, bool more_sums, Sums& sums) {
  T max;
  find_max<T, PLAIN>(row, max, sums.argmax);
  sums.max = max, sums.rest = sums.weighted = sums.squares = sums.total = 0.0;
  for (int64_t tile = 0; tile < row.size; tile += kTile) {
    const int64_t stop = row.size - tile < kTile ? row.size : tile + kTile;
    for (int64_t lane = 0; lane < kLanes; lane += kWidth<T>) {
      Vector<T> rest{}, weighted{}, squares{}, total{};
      for (int64_t start = tile + lane; start < stop; start += kLanes) {
        Vector<T> z = scaled_at<T, PLAIN>(row, start);
        if (more_sums) total += filled<T>(z, count_at<T>(start, row.size), 0.0f);
        const int64_t place = sums.argmax - start;
        if (place >= 0 && place < kWidth<T>) z[place] = -INFINITY;
        const Vector<T> shifted = z - max, e = exp(shifted);
        rest += e;
        weighted += e * at_least(shifted, splat<Vector<T>>(T(kLowest)));
        if (more_sums) squares += e * e;
      }
      add_to<T>(sums.rest, rest), add_to<T>(sums.weighted, weighted);
      if (more_sums) add_to<T>(sums.squares, squares), add_to<T>(sums.total, total);
    }
  }
  // several +inf give inf - inf = NaN; the others' probability is 0, as with a single +inf
  if (max == T(INFINITY) && std::isnan(sums.rest) && !has_nan<T, PLAIN>(row)) sums.rest = sums.squares = 0.0;
  if (target >= 0 && target < row.size) {
    const Vector<T> z = scaled<T, PLAIN>(row, biased<T, PLAIN>(row, target, 1));
    sums.z_target = z[0], sums.exp_target = exp(z - max)[0];
  }
}

template <class T, bool PLAIN>
void gradient(const Row<T>& row, const GradientInputs<T>& in) {
  const bool has_target = in.target_id >= 0 && in.target_id < row.size;
  Vector<T> d_target{};  // read before `out`, which may be the row itself, is written
  if (has_target) d_target = slope<T, PLAIN>(row, biased<T, PLAIN>(row, in.target_id, 1)) * in.dz_target;
  char* const out = static_cast<char*>(in.out);
  for (int64_t start = 0; start < row.size; start += kWidth<T>) {
    const int count = count_at<T>(start, row.size);
    const Vector<T> x = biased<T, PLAIN>(row, start, count), shifted = scaled<T, PLAIN>(row, x) - in.max;
    Vector<T> d = splat<Vector<T>>(-in.d_logp);
    if (in.has_d_entropy) d -= (at_least(shifted, splat<Vector<T>>(T(kLowest))) + in.offset) * in.d_entropy;
    d = (d * (exp(shifted) * in.inv_sum)) * slope<T, PLAIN>(row, x);
    store_some<T>(out + start * size_of(in.dtype), in.dtype, d, count);
  }
  if (has_target) store_some<T>(out + in.target_id * size_of(in.dtype), in.dtype, d_target, 1);
}

template <class T>
bool is_plain(const Row<T>& row) {
  return row.dtype == kDtype<T> && row.bias == nullptr && !row.rounds && !row.has_softcap;
}

template <class T>
void reduce_any(const Row<T>& row, int64_t target, bool more_sums, Sums& sums) {
  is_plain(row) ? reduce<T, true>(row, target, more_sums, sums) : reduce<T, false>(row, target, more_sums, sums);
}

template <class T>
void gradient_any(const Row<T>& row, const GradientInputs<T>& in) {
  is_plain(row) ? gradient<T, true>(row, in) : gradient<T, false>(row, in);
}
