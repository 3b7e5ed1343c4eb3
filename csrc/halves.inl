// 16-bit numbers to float and back, rounded to nearest, ties to even; and vectors in memory, of every dtype.

INLINE Float from_bf16(Half h) { return bits<Float>(__builtin_convertvector(h, UInt) << 16); }

INLINE Half to_bf16(Float x) {
  const UInt u = bits<UInt>(x), rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
  const UInt is_nan = bits<UInt>(x != x);
  return __builtin_convertvector((is_nan & 0x7fc0) | (~is_nan & rounded), Half);
}

// Exponents are moved by the difference of the biases; a subnormal half is 2^-14 (1 + fraction), less 2^-14.
INLINE Float from_f16(Half h) {
  const UInt u = __builtin_convertvector(h, UInt), magnitude = (u & 0x7fff) << 13, exponent = magnitude & 0x0f800000;
  const UInt is_special = bits<UInt>(exponent == splat<UInt>(0x0f800000u));  // inf and NaN
  const UInt is_subnormal = bits<UInt>(exponent == UInt{});
  const UInt moved = magnitude + (112u << 23) + (is_special & (112u << 23));
  const UInt small = bits<UInt>(bits<Float>(moved + (1u << 23)) - bits<Float>(splat<UInt>(113u << 23)));
  return bits<Float>((is_subnormal & small) | (~is_subnormal & moved) | ((u & 0x8000) << 16));
}

INLINE Half to_f16(Float x) {
  const UInt u = bits<UInt>(x), sign = u & 0x80000000u, size = u ^ sign;
  const UInt rounded = (size - (112u << 23) + 0xfff + ((size >> 13) & 1)) >> 13;
  // below 2^-14 a float addition rounds: the addend moves the last bit of a half to the last bit of the float
  const UInt magic = splat<UInt>(126u << 23);
  const UInt small = bits<UInt>(bits<Float>(size) + bits<Float>(magic)) - magic;
  const UInt is_small = bits<UInt>(size < splat<UInt>(113u << 23));
  const UInt is_special = bits<UInt>(size >= splat<UInt>(143u << 23));  // too large, inf, NaN
  const UInt is_nan = bits<UInt>(x != x);
  const UInt finite = (is_small & small) | (~is_small & rounded);
  const UInt special = 0x7c00u | (is_nan & 0x0200u);
  return __builtin_convertvector((is_special & special) | (~is_special & finite) | (sign >> 16), Half);
}

INLINE Float rounded_to(Float x, Dtype dtype) {
  return dtype == Dtype::bf16 ? from_bf16(to_bf16(x)) : from_f16(to_f16(x));
}

// kWidth<T> numbers of `dtype`: that of T or, if T is float, a 16-bit one.
template <class T>
INLINE Vector<T> load(const void* from, Dtype dtype) {
  if constexpr (sizeof(T) == 4) {
    if (dtype != Dtype::f32) {
      Half h;
      std::memcpy(&h, from, sizeof h);
      return dtype == Dtype::bf16 ? from_bf16(h) : from_f16(h);
    }
  }
  Vector<T> x;
  std::memcpy(&x, from, sizeof x);
  return x;
}

template <class T>
INLINE void store(void* to, Dtype dtype, Vector<T> x) {
  if constexpr (sizeof(T) == 4) {
    if (dtype != Dtype::f32) {
      const Half h = dtype == Dtype::bf16 ? to_bf16(x) : to_f16(x);
      std::memcpy(to, &h, sizeof h);
      return;
    }
  }
  std::memcpy(to, &x, sizeof x);
}

// The first `count` numbers; the others are 0 when read, and left alone when stored.
template <class T>
INLINE Vector<T> load_some(const void* from, Dtype dtype, int count) {
  if (count == kWidth<T>) return load<T>(from, dtype);
  char buffer[VECTOR_BYTES] = {};
  std::memcpy(buffer, from, count * size_of(dtype));
  return load<T>(buffer, dtype);
}
template <class T>
INLINE void store_some(void* to, Dtype dtype, Vector<T> x, int count) {
  if (count == kWidth<T>) return store<T>(to, dtype, x);
  char buffer[VECTOR_BYTES];
  store<T>(buffer, dtype, x);
  std::memcpy(to, buffer, count * size_of(dtype));
}
