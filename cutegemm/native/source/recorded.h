// The node of a product in autograd's graph: as `cutegemm.pytorch.autograd`, which computes what this leaves to Python.
#pragma once

#include <mutex>

#include <ATen/ops/sum.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/dynamo/compiled_autograd.h>

#include "interpreter.h"
#include "multiply.h"

namespace cutegemm {

namespace in_python {
inline Hook gradients{"gradients"};
}

using torch::autograd::SavedVariable;
using torch::autograd::variable_list;
using NodePointer = decltype(torch::autograd::Edge::function);  // a shared or an intrusive pointer, by torch's version

// What gradients depend on beside the operands.
struct Settings {
  Options options;
  double alpha = 1, beta = 0;
  bool is_linear = false;  // b is the weight of a linear, (N, K), and a has any dimensions
};

// relu's derivative is read off the result: its recording is left to Python, which refuses that of 8-bit operands.
inline bool may_record(const Options& options, const at::Tensor& a) {
  return a.element_size() > 1 && (options.activation == 0 || activations.known[options.activation - 1] != "relu");
}

// Gradients of D = act(alpha a b + beta c + bias): of a, b, c and bias.
struct GemmBackward : public torch::autograd::Node {
  Settings settings;
  SavedVariable a, b, c, bias;
  std::optional<std::vector<int64_t>> shape_of_c;
  std::optional<at::ScalarType> dtype_of_c, dtype_of_bias;

  std::string name() const override { return "GemmBackward"; }

  void release_variables() override {
    std::lock_guard<std::mutex> lock(mutex_);
    for (SavedVariable* saved : {&a, &b, &c, &bias}) saved->reset_data();
  }

  variable_list apply(variable_list&& gradients) override {
    const at::Tensor dz = gradients[0];
    if (!dz.defined()) return variable_list(4);
    const auto [a_, b_, c_, bias_] = [this] {
      std::lock_guard<std::mutex> lock(mutex_);
      return std::array<at::Tensor, 4>{a.unpack(), b.unpack(), c.unpack(), bias.unpack()};
    }();
    variable_list found(4);
    if (!in_place_of_python(dz, a_, b_, found)) by_python(dz, a_, b_, c_, bias_, found);
    return found;
  }

  void compiled_args(torch::autograd::CompiledNodeArgs& args) const override {
    args.collect(a, false), args.collect(b, false), args.collect(c, false), args.collect(bias, false);
    args.collect(settings.alpha), args.collect(settings.beta), args.collect(settings.is_linear);
    const Options& o = settings.options;
    for (int number : {o.activation, o.how[PRECISION], o.how[BACKEND], o.out_dtype})
      args.collect(static_cast<int64_t>(number));
    for (int64_t extent : shape_of_c.value_or(std::vector<int64_t>{-1})) args.collect(extent);
    args.collect(static_cast<int64_t>(dtype_of_c.value_or(at::ScalarType::Undefined)));
    args.collect(static_cast<int64_t>(dtype_of_bias.value_or(at::ScalarType::Undefined)));
  }

  variable_list apply_with_saved(const variable_list& inputs, torch::autograd::SwapSavedVariables& saved) override {
    saved.before(a), saved.before(b), saved.before(c), saved.before(bias);
    variable_list found = apply(variable_list(inputs));
    saved.after(a), saved.after(b), saved.after(c), saved.after(bias);
    return found;
  }

 private:
  // The gradients of matrices without an activation, where all launches are prepared and nothing is recorded.
  bool in_place_of_python(const at::Tensor& dz, const at::Tensor& a_, const at::Tensor& b_, variable_list& found) {
    const bool needs_c = task_should_compute_output(2), needs_bias = task_should_compute_output(3);
    if (settings.options.activation != 0 || needs_c || c10::GradMode::is_enabled() ||
        state_of_thread() != Thread::plain || dz.scalar_type() != a_.scalar_type() || dz.device() != a_.device())
      return false;
    Matrix x, y, z;
    if (!(settings.is_linear ? describe_rows(a_, x) && describe_rows(dz, z) : describe(a_, x) && describe(dz, z)) ||
        !describe(b_, y) || x.dim != 2 || y.dim != 2 || z.dim != 2)
      return false;
    if (settings.is_linear) y = y.turned();
    const int device = a_.device().index();
    if (task_should_compute_output(0)) {
      // a has its own shape, which matters for a linear only: there its rows are one matrix.
      const bool many = a_.dim() != 2;
      if (many && column_major(x)) return false;
      if (!product(z, y.turned(), x, device, many ? a_.sizes() : c10::IntArrayRef(), found[0])) return false;
      if (column_major(x)) found[0] = found[0].t();
    }
    if (task_should_compute_output(1)) {
      if (!product(x.turned(), z, y, device, {}, found[1])) return false;
      if (column_major(y) != settings.is_linear) found[1] = found[1].t();
    }
    if (needs_bias) found[3] = sum_of_columns(dz);
    return true;
  }

  static bool column_major(const Matrix& matrix) { return matrix.strides[0] == 1 && matrix.strides[1] != 1; }

  // alpha x y for a gradient in the memory order of `like`: the transposed one where that is column-major.
  bool product(
      const Matrix& x, const Matrix& y, const Matrix& like, int device, c10::IntArrayRef shape, at::Tensor& found) {
    Operands of;
    of.device = device;
    const bool transposed = column_major(like);
    of.a = transposed ? y.turned() : x, of.b = transposed ? x.turned() : y;
    Known launch;
    if (look_up(of, 0, settings.options.of_gradients(like.dtype), launch) != Found::launch) return false;
    auto d = multiply(*launch, of, settings.alpha, 0, shape.empty() ? c10::IntArrayRef(launch->shape) : shape);
    if (!d) return false;
    found = std::move(*d);
    return true;
  }

  // 16-bit numbers are summed in fp32 and rounded once.
  at::Tensor sum_of_columns(const at::Tensor& dz) const {
    const at::DimVector rows = [&] {
      at::DimVector made;
      for (int64_t i = 0; i + 1 < dz.dim(); ++i) made.push_back(i);
      return made;
    }();
    if (dz.scalar_type() == *dtype_of_bias) return at::sum(dz, rows);
    return at::sum(dz, rows, /*keepdim=*/false, at::ScalarType::Float).to(*dtype_of_bias);
  }

  void by_python(
      const at::Tensor& dz, const at::Tensor& a_, const at::Tensor& b_, const at::Tensor& c_, const at::Tensor& bias_,
      variable_list& found) {
    WithInterpreter held;
    PyObject* needs = checked(PyTuple_New(4));
    for (int i = 0; i < 4; ++i) PyTuple_SET_ITEM(needs, i, to_python(task_should_compute_output(i)));
    const Options& o = settings.options;
    PyObject* made = call(
        in_python::gradients,
        {to_python(dz), needs, to_python(a_), to_python(b_), to_python(c_), to_python(bias_),
         shape_of_c ? to_python(*shape_of_c) : none(), to_python(dtype_of_c), to_python(dtype_of_bias),
         to_python(settings.is_linear), to_python(settings.alpha), to_python(settings.beta),
         name_of(activations, o.activation), name_of(accepted[PRECISION], o.how[PRECISION]),
         name_of(accepted[BACKEND], o.how[BACKEND])});
    for (int i = 0; i < 4; ++i) found[i] = taken(checked(PySequence_GetItem(made, i)));
    Py_DECREF(made);
  }
};

template <typename T, typename Pointer>
Pointer new_node() {
  if constexpr (std::is_same_v<Pointer, std::shared_ptr<torch::autograd::Node>>) {
    // Torch's own deleter, which frees a long chain of nodes without recursion, and is gone where pointers are intrusive.
    return Pointer(new T(), [](auto* node) { deleteNode(node); });
  } else {
    return c10::make_intrusive<T>();
  }
}

// Records that d was computed of these; undefined tensors stand for those that the call does not have.
inline void record(
    const at::Tensor& d, const at::Tensor& a, const at::Tensor& b, const at::Tensor& c, const at::Tensor& bias,
    const Settings& settings) {
  const NodePointer pointer = new_node<GemmBackward, NodePointer>();
  auto* node = static_cast<GemmBackward*>(pointer.get());
  node->set_next_edges(torch::autograd::collect_next_edges(a, b, c, bias));
  node->settings = settings;
  const bool again = settings.options.activation != 0;  // the backward pass then computes alpha a b + beta c + bias
  node->a = SavedVariable(a, false), node->b = SavedVariable(b, false);
  if (again && settings.beta != 0 && c.defined()) node->c = SavedVariable(c, false);
  if (again && bias.defined()) node->bias = SavedVariable(bias, false);
  if (c.defined()) node->shape_of_c = c.sizes().vec(), node->dtype_of_c = c.scalar_type();
  if (bias.defined()) node->dtype_of_bias = bias.scalar_type();
  torch::autograd::set_history(d, pointer);
}

}  // namespace cutegemm
