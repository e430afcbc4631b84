// The fused operator's kernels for CPUs: forward and backward, each in one pass over memory.
//
// Written against torch's stable ABI, so that one build runs with torch 2.11 and later. Results do
// not depend on the number of threads: a row is computed by one thread, and the gradients of weight
// and bias are summed over chunks of rows that depend on the shape alone.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <new>
#include <optional>
#include <tuple>
#include <vector>

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

namespace {

template <class Real>
struct Pair {
  Real first, second;
};

struct BFloat16 {
  uint16_t bits;
};

// Conversion from a tensor's type to the compute type, which is exact, and back, which rounds once,
// to nearest even.
inline double widen(double x) { return x; }
inline float widen(float x) { return x; }
inline float widen(_Float16 x) { return x; }
inline float widen(BFloat16 x) {
  const uint32_t bits = uint32_t(x.bits) << 16;
  float result;
  std::memcpy(&result, &bits, sizeof result);
  return result;
}

template <class T, class Real>
inline T narrow(Real x) {
  return x;
}
template <>
inline BFloat16 narrow<BFloat16>(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const uint32_t quiet_nan = (bits >> 16) | 0x40;
  return {uint16_t(x != x ? quiet_nan : rounded)};
}

}  // namespace

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define HAS_INSTRUCTION_SETS
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,fma,f16c,prefer-vector-width=512")
namespace avx512 {
#include "cpu_rows.h"
}
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
namespace avx2 {
#include "cpu_rows.h"
}
#pragma GCC pop_options
#endif
namespace baseline {
#include "cpu_rows.h"
}

namespace {

// Number of elements per thread below which a second thread costs more than it saves.
constexpr int64_t MIN_ELEMENTS_PER_THREAD = 16384;
// Number of rows over which the gradients of weight and bias are summed in the compute type. The
// sums of these blocks are added in double precision.
constexpr int64_t BLOCK_ROWS = 32;
// Maximum number of chunks of rows that can run in parallel in the backward pass.
constexpr int64_t MAX_CHUNKS = 64;

// The row functions, compiled for the best instruction set that this CPU supports.
template <class T, class Real>
struct Rows {
  decltype(&baseline::forward_row<T, Real, true>) forward;
  decltype(&baseline::backward_row<T, Real, true>) backward;

  template <bool CENTRED>
  static Rows best() {
#ifdef HAS_INSTRUCTION_SETS
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c"))
      return {avx512::forward_row<T, Real, CENTRED>, avx512::backward_row<T, Real, CENTRED>};
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
        __builtin_cpu_supports("f16c"))
      return {avx2::forward_row<T, Real, CENTRED>, avx2::backward_row<T, Real, CENTRED>};
#endif
    return {baseline::forward_row<T, Real, CENTRED>, baseline::backward_row<T, Real, CENTRED>};
  }

  // Returns the row functions of layer norm if `centred`, else of RMS norm.
  static const Rows& of(bool centred) {
    static const Rows layer_norm = best<true>(), rms_norm = best<false>();
    return centred ? layer_norm : rms_norm;
  }
};

// Calls body(T{}, Real{}) with the tensor's type T and its compute type Real.
template <class Body>
void for_type_of(const Tensor& tensor, Body body) {
  switch (tensor.scalar_type()) {
    case ScalarType::Float: return body(float{}, float{});
    case ScalarType::BFloat16: return body(BFloat16{}, float{});
    case ScalarType::Half: return body(_Float16{}, float{});
    case ScalarType::Double: return body(double{}, double{});
    default: STD_TORCH_CHECK(false, "tensors must be float32, bfloat16, float16 or float64");
  }
}

template <class T>
const T* data(const Tensor& tensor) {
  return static_cast<const T*>(tensor.const_data_ptr());
}

template <class T>
T* mutable_data(const Tensor& tensor) {
  return static_cast<T*>(tensor.mutable_data_ptr());
}

// An array of zeros, aligned to a cache line: SIMD vectors across two lines take twice as long.
template <class Real>
class Buffer {
 public:
  explicit Buffer(int64_t size)
      : size_(size), data_(static_cast<Real*>(::operator new(size * sizeof(Real), LINE))) {
    std::fill_n(data_, size, Real(0));
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { ::operator delete(data_, LINE); }

  Real* begin() { return data_; }
  Real* end() { return data_ + size_; }

 private:
  static constexpr std::align_val_t LINE{64};
  int64_t size_;
  Real* data_;
};

bool same_shape(const Tensor& a, const Tensor& b) {
  if (a.dim() != b.dim()) return false;
  for (int64_t axis = 0; axis < a.dim(); ++axis)
    if (a.size(axis) != b.size(axis)) return false;
  return true;
}

// For a forward pass, op.py replaces this error with one that names the argument.
void check(const Tensor& x, const std::optional<Tensor>& other,
           const std::optional<Tensor>& weight, const std::optional<Tensor>& bias) {
  const auto fits = [&](const std::optional<Tensor>& parameter) {
    return !parameter || (parameter->is_cpu() && parameter->dim() == 1 &&
                          parameter->size(0) == x.size(-1));
  };
  STD_TORCH_CHECK(
      x.dim() >= 1 && fits(weight) && fits(bias) &&
          (!other || (other->is_cpu() && same_shape(x, *other) &&
                      x.scalar_type() == other->scalar_type())) &&
          (!weight || !bias || weight->scalar_type() == bias->scalar_type()),
      "the shapes, dtypes or devices of the arguments do not match");
}

// `dense`, `allocate` and `allocate_like` avoid the dispatcher, whose calls take as long as the
// rows of a small batch.
Tensor dense(const Tensor& tensor) {
  return tensor.is_contiguous() ? tensor : torch::stable::contiguous(tensor);
}

Tensor allocate(int64_t dimensions, const int64_t* sizes, int32_t dtype) {
  std::vector<int64_t> strides(dimensions);
  int64_t elements = 1;
  for (int64_t axis = dimensions; axis-- > 0; elements *= std::max<int64_t>(sizes[axis], 1))
    strides[axis] = elements;
  AtenTensorHandle handle;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(
      dimensions, sizes, strides.data(), dtype, aoti_torch_device_type_cpu(), 0, &handle));
  return Tensor(handle);
}

Tensor allocate_like(const Tensor& tensor) {
  int32_t dtype;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(tensor.get(), &dtype));
  return allocate(tensor.dim(), tensor.sizes().data(), dtype);
}

// Fills the buffer with a parameter, converted to the compute type, or with `absent` if there is no
// parameter.
template <class Real>
void read(const std::optional<Tensor>& parameter, Buffer<Real>& buffer, Real absent) {
  std::fill(buffer.begin(), buffer.end(), absent);
  if (parameter)
    for_type_of(*parameter, [&](auto type, auto) {
      const Tensor stored = dense(*parameter);
      const auto* elements = data<decltype(type)>(stored);
      for (Real& value : buffer) value = widen(*elements++);
    });
}

std::tuple<Tensor, Tensor> forward(const Tensor& given, const std::optional<Tensor>& other,
                                   const std::optional<Tensor>& weight,
                                   const std::optional<Tensor>& bias, double eps, bool centred) {
  check(given, other, weight, bias);
  const Tensor x = dense(given);
  const Tensor residual = other ? dense(*other) : x;
  Tensor y = allocate_like(x);
  Tensor total = other ? allocate_like(x) : x;
  const int64_t width = x.size(-1), rows = width ? x.numel() / width : 0;
  for_type_of(x, [&](auto type, auto real) {
    using T = decltype(type);
    using Real = decltype(real);
    const auto& kernels = Rows<T, Real>::of(centred);
    Buffer<Real> scale(width), shift(width);
    read<Real>(weight, scale, 1);
    read<Real>(bias, shift, 0);
    const T *x_data = data<T>(x), *residual_data = other ? data<T>(residual) : nullptr;
    T *y_data = mutable_data<T>(y), *total_data = other ? mutable_data<T>(total) : nullptr;
    const int64_t grain = MIN_ELEMENTS_PER_THREAD / std::max<int64_t>(width, 1) + 1;
    torch::stable::parallel_for(0, rows, grain, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin * width; i < end * width; i += width)
        kernels.forward(x_data + i, other ? residual_data + i : nullptr, scale.begin(),
                        shift.begin(), y_data + i, other ? total_data + i : nullptr, width, eps);
    });
  });
  return {y, total};
}

Tensor norm(const Tensor& x, const std::optional<Tensor>& weight, const std::optional<Tensor>& bias,
            double eps, bool centred) {
  return std::get<0>(forward(x, std::nullopt, weight, bias, eps, centred));
}

std::tuple<Tensor, Tensor> add_norm(const Tensor& x, const Tensor& residual,
                                    const std::optional<Tensor>& weight,
                                    const std::optional<Tensor>& bias, double eps, bool centred) {
  return forward(x, residual, weight, bias, eps, centred);
}

std::tuple<Tensor, Tensor, Tensor> norm_backward(const Tensor& given_dy,
                                                 const std::optional<Tensor>& given_dsum,
                                                 const Tensor& given_total,
                                                 const std::optional<Tensor>& weight, double eps,
                                                 bool centred) {
  check(given_total, given_dy, weight, std::nullopt);
  if (given_dsum) check(given_total, given_dsum, std::nullopt, std::nullopt);
  const Tensor total = dense(given_total);
  const Tensor dy = dense(given_dy);
  const Tensor dsum = given_dsum ? dense(*given_dsum) : dy;
  const int64_t width = total.size(-1), rows = width ? total.numel() / width : 0;
  const int32_t wide = total.scalar_type() == ScalarType::Double ? aoti_torch_dtype_float64()
                                                                 : aoti_torch_dtype_float32();
  Tensor dx = allocate_like(total);
  Tensor dweight = allocate(1, &width, wide), dbias = allocate(1, &width, wide);
  for_type_of(total, [&](auto type, auto real) {
    using T = decltype(type);
    using Real = decltype(real);
    const auto& kernels = Rows<T, Real>::of(centred);
    Buffer<Real> scale(width);
    read<Real>(weight, scale, 1);
    const T *dy_data = data<T>(dy), *total_data = data<T>(total);
    const T* dsum_data = given_dsum ? data<T>(dsum) : nullptr;
    T* dx_data = mutable_data<T>(dx);
    const int64_t chunk_rows = std::max(BLOCK_ROWS, (rows + MAX_CHUNKS - 1) / MAX_CHUNKS);
    const int64_t chunks = (rows + chunk_rows - 1) / chunk_rows;
    Buffer<double> partial(chunks * 2 * width);  // (chunks, 2, width): dweight and dbias
    const int64_t grain = MIN_ELEMENTS_PER_THREAD / std::max<int64_t>(chunk_rows * width, 1) + 1;
    torch::stable::parallel_for(0, chunks, grain, [&](int64_t begin, int64_t end) {
      Buffer<Real> block(2 * width);
      for (int64_t chunk = begin; chunk < end; ++chunk) {
        const int64_t last = std::min(rows, (chunk + 1) * chunk_rows);
        for (int64_t first = chunk * chunk_rows; first < last; first += BLOCK_ROWS) {
          std::fill(block.begin(), block.end(), Real(0));
          const int64_t stop = std::min(last, first + BLOCK_ROWS) * width;
          for (int64_t i = first * width; i < stop; i += width)
            kernels.backward(dy_data + i, dsum_data ? dsum_data + i : nullptr, total_data + i,
                             scale.begin(), dx_data + i, block.begin(), block.begin() + width,
                             width, eps);
          double* sums = partial.begin() + chunk * 2 * width;
          for (int64_t i = 0; i < 2 * width; ++i) sums[i] += block.begin()[i];
        }
      }
    });
    Real *dweight_data = mutable_data<Real>(dweight), *dbias_data = mutable_data<Real>(dbias);
    for (int64_t chunk = 1; chunk < chunks; ++chunk)
      for (int64_t i = 0; i < 2 * width; ++i)
        partial.begin()[i] += partial.begin()[chunk * 2 * width + i];
    for (int64_t i = 0; i < width; ++i) {
      dweight_data[i] = chunks ? partial.begin()[i] : 0;
      dbias_data[i] = chunks ? partial.begin()[width + i] : 0;
    }
  });
  return {dx, dweight, dbias};
}

}  // namespace

// The operators are defined in op.py, which then loads this library.
STABLE_TORCH_LIBRARY_IMPL(vitrine, CPU, library) {
  library.impl("norm", TORCH_BOX(&norm));
  library.impl("add_norm", TORCH_BOX(&add_norm));
  library.impl("norm_backward", TORCH_BOX(&norm_backward));
}
