// Which tensors, and which state of the calling thread, the functions here handle; Python handles all others.
#pragma once

#include <algorithm>
#include <array>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include <ATen/TensorUtils.h>
#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace cutegemm {

// The one object of a class, made at the first call. It is never freed: threads may use it while the process ends.
template <typename What>
What& kept() {
  static auto* made = new What;
  return *made;
}

// The kind of device whose tensors are handled: CUDA, and in tests without a GPU the CPU.
struct Device {
  c10::DeviceType type = c10::DeviceType::CUDA;
  c10::DispatchKey key = c10::DispatchKey::CUDA;
  c10::DispatchKey autograd = c10::DispatchKey::AutogradCUDA;
  c10::DispatchKey autocast = c10::DispatchKey::AutocastCUDA;
  // The handle of the current stream of a device of that number; other than 0 is an error.
  int32_t (*current_stream)(int32_t device, void** stream) = nullptr;
  // Whether a stream is captured into a graph; other than 0 is an error, as of a stream that may not be asked.
  int (*is_capturing)(void* stream, int* status) = nullptr;

  // The keys of a plain dense tensor, and those that say nothing of it but that it is not an inference tensor.
  uint64_t plain() const { return c10::DispatchKeySet(key).raw_repr(); }
  uint64_t ignored() const {
    return (c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::DispatchKeySet(c10::DispatchKey::AutocastCPU) |
            c10::DispatchKeySet(c10::DispatchKey::AutocastCUDA))
               .raw_repr() &
           ~plain();
  }
};

inline Device served;

// No fake tensor, no subclass with a mode of its own, nothing wrapped by torch.func, no conjugate or negative view.
inline bool is_plain(const at::Tensor& tensor) {
  static const uint64_t plain = served.plain(), ignored = served.ignored();
  return (tensor.key_set().raw_repr() & ~ignored) == plain;
}

enum class Thread { plain, autocast, other };

// Without the key of named tensors, which older versions of torch exclude while a node of autograd's graph runs.
inline c10::DispatchKeySet without_names(c10::DispatchKeySet keys) {
#if __has_include(<ATen/core/NamedTensor.h>)
  return keys.remove(c10::DispatchKey::Named);
#else
  return keys;
#endif
}

// plain: no mode sees the calls of this thread, as without any or in inference mode. autocast: that is on, and no other.
inline Thread state_of_thread() {
  const c10::impl::LocalDispatchKeySet now = c10::impl::tls_local_dispatch_key_set();
  constexpr c10::DispatchKeySet in_inference_mode = c10::default_included_set.remove(c10::DispatchKey::ADInplaceOrView);
  const c10::DispatchKeySet excluded = without_names(now.excluded_ | c10::autocast_dispatch_keyset);
  const bool plain = now.included_ == c10::default_included_set && excluded == c10::default_excluded_set;
  const bool inference = now.included_ == in_inference_mode &&
                         excluded == (c10::default_excluded_set | c10::autograd_dispatch_keyset);
  if (!plain && !inference) return Thread::other;
  return now.excluded_.has(served.autocast) ? Thread::plain : Thread::autocast;
}

inline bool has_tangent(const at::Tensor* tensor) { return tensor != nullptr && tensor->_fw_grad(0).defined(); }

inline bool requires_grad(const at::Tensor* tensor) { return tensor != nullptr && tensor->requires_grad(); }

using Tensors = c10::ArrayRef<const at::Tensor*>;  // those not there are null pointers

inline bool to_be_recorded(Tensors tensors) {
  return c10::GradMode::is_enabled() && std::any_of(tensors.begin(), tensors.end(), requires_grad);
}

inline bool has_tangent(Tensors tensors) {
  return std::any_of(tensors.begin(), tensors.end(), [](const at::Tensor* each) { return has_tangent(each); });
}

inline bool nothing_recorded(Tensors tensors) { return !to_be_recorded(tensors) && !has_tangent(tensors); }

// What a launch must know of an operand; a view of a tensor needs no tensor of its own.
struct Matrix {
  const void* data = nullptr;
  int dim = 0;
  std::array<int64_t, 3> sizes{}, strides{};
  at::ScalarType dtype = at::ScalarType::Undefined;

  explicit operator bool() const { return data != nullptr; }

  // A single row has the same stride wherever it comes from, and so has a single column: nothing reads it.
  void settle(int single, int other) {
    if (sizes[single] == 1 && strides[other] == 1 && strides[single] >= sizes[other]) strides[single] = sizes[other];
  }

  // The last two dimensions exchanged.
  Matrix turned() const {
    Matrix made = *this;
    std::swap(made.sizes[dim - 1], made.sizes[dim - 2]);
    std::swap(made.strides[dim - 1], made.strides[dim - 2]);
    return made;
  }

  // Bytes from the first to past the last element.
  int64_t reach() const {
    int64_t last = 0;
    for (int i = 0; i < dim; ++i) last += (sizes[i] - 1) * strides[i];
    return (last + 1) * static_cast<int64_t>(c10::elementSize(dtype));
  }

  bool overlaps(const Matrix& other) const {
    const char *first = static_cast<const char*>(data), *second = static_cast<const char*>(other.data);
    return first < second + other.reach() && second < first + reach();
  }
};

// False for a tensor that Python must look at, among them all without memory.
inline bool describe(const at::Tensor& tensor, c10::IntArrayRef sizes, c10::IntArrayRef strides, Matrix& made) {
  if (sizes.size() > 3 || tensor.numel() == 0) return false;
  made.dim = static_cast<int>(sizes.size());
  for (int i = 0; i < made.dim; ++i) made.sizes[i] = sizes[i], made.strides[i] = strides[i];
  if (made.dim > 1) made.settle(made.dim - 2, made.dim - 1), made.settle(made.dim - 1, made.dim - 2);
  made.dtype = tensor.scalar_type();
  made.data = tensor.const_data_ptr();
  return made.data != nullptr;
}

inline bool describe(const at::Tensor& tensor, Matrix& made) {
  return is_plain(tensor) && describe(tensor, tensor.sizes(), tensor.strides(), made);
}

// A tensor of any dimensions as a matrix of its rows, or of three dimensions as it is; false where that takes a copy.
inline bool describe_rows(const at::Tensor& tensor, Matrix& made) {
  if (!is_plain(tensor) || tensor.dim() == 0) return false;
  if (tensor.dim() == 2) return describe(tensor, tensor.sizes(), tensor.strides(), made);
  int64_t rows = 1;
  for (int64_t i = 0; i + 1 < tensor.dim(); ++i) rows *= tensor.size(i);
  const at::DimVector shape{rows, tensor.size(-1)};
  const auto strides = at::detail::computeStride(tensor.sizes(), tensor.strides(), shape);
  if (strides.has_value()) return describe(tensor, shape, *strides, made);
  return tensor.dim() == 3 && describe(tensor, tensor.sizes(), tensor.strides(), made);
}

using Text = c10::string_view;
using OptionalText = std::optional<Text>;  // without a text: None
using OptionalTexts = std::optional<c10::List<std::string>>;

// What an argument accepts, in the order of Python's lists; `configure` sets them.
struct Names {
  std::vector<std::string> known;
  int none = -1;  // the place of None: 0 where it is accepted

  // The place of a name, 1 for the first; -1 for one that is not known.
  int find(const OptionalText& name) const {
    if (!name) return none;
    for (size_t i = 0; i < known.size(); ++i)
      if (known[i] == *name) return static_cast<int>(i) + 1;
    return -1;
  }
};

inline Names activations, layer_activations;  // of layers: further ones, whose columns are gate and up, behind them
inline Names scalings, quantizers;  // of `quantize`: what `scaling` and `backend` accept

// The fields of `How` in cutegemm/run/how.py; build.py reads their types off the schema of torch's operator.
constexpr int FIELDS = std::tuple_size_v<std::tuple<OPTION_TYPES>>;
constexpr int PRECISION = 0, BACKEND = 1;  // the two that are looked at here
inline std::array<Names, FIELDS> accepted;

// The options of a call, by their places in those lists; 0 is None. out_dtype: -1 is None.
struct Options {
  int activation = 0, out_dtype = -1;
  std::array<int, FIELDS> how{};

  void take(int field, const OptionalText& text) { how[field] = accepted[field].find(text); }

  bool known() const { return activation >= 0 && *std::min_element(how.begin(), how.end()) >= 0; }

  // Whether something is said of the operands given, which holds neither for gradients nor for what autocast makes.
  bool of_operands() const { return *std::max_element(how.begin() + BACKEND + 1, how.end()) > 0; }

  Options of_gradients(at::ScalarType dtype) const {
    Options made = *this;
    std::fill(made.how.begin() + BACKEND + 1, made.how.end(), 0);
    made.out_dtype = static_cast<int>(dtype);
    return made;
  }
};

}  // namespace cutegemm
