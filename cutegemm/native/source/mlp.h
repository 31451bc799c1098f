// Gated MLPs by prepared launches. cutegemm/mlp_operator.py tells of those of 8 bits. For MLPs of 16 and 32 bits `gemm`
// tells of both products.
#pragma once

#include "operator.h"
#include "reading.h"

namespace cutegemm {

namespace in_python {
inline Hook quantized_mlp{"quantized_mlp"};
}

// -- 8 bits ------------------------------------------------------------------------------------------------------------

// The launches of a call, in order: those that quantize x, the first product, which gates, those that quantize the
// hidden layer, and the second product.
struct QuantizedMlp {
  Quantization of_x;
  ProgramLaunch hidden;
  std::optional<Quantization> of_hidden;  // none where the first product quantizes
  ProgramLaunch result;
};

struct QuantizedMlpCall {
  const at::Tensor *x = nullptr, *gate_up = nullptr, *scale_gate_up = nullptr, *down = nullptr, *scale_down = nullptr;
  Matrix rows, first, first_scale, second, second_scale;
  int scaling = -1;  // of x and of the hidden layer
  Options options;
  int device = 0;

  // Returns false if Python must handle this call. Leading dimensions of x are merged.
  bool describe() {
    const auto fits = [&](const at::Tensor* tensor, Matrix& matrix) {
      return cutegemm::describe(*tensor, matrix) && tensor->device() == x->device();
    };
    if (scaling < 0 || !options.known() || !describe_rows(*x, rows) || rows.dim != 2) return false;
    device = x->device().index();
    return fits(gate_up, first) && fits(scale_gate_up, first_scale) && fits(down, second) &&
           fits(scale_down, second_scale);
  }

  bool records() const { return !nothing_recorded({x, gate_up, scale_gate_up, down, scale_down}); }

  Key key() const {
    Key made;
    made.add(scaling | (options.activation << 8), device, options);
    made.add(rows, 63);  // the mask that `key_of` has for ToQuantize
    for (const Matrix* each : {&first, &first_scale, &second, &second_scale}) made.add(*each, 15);
    return made;
  }

  Found compute(at::Tensor& d) const {
    Table<QuantizedMlp>::Known known;
    const Found found = table_of<QuantizedMlp>().find(key(), known);
    if (found != Found::launch) return found;
    // If Python has to launch one of the products, it computes the whole MLP.
    if (!have_destinations({&known->hidden, &known->result}, device)) return Found::python;
    return launch(*known, d) ? Found::launch : Found::python;
  }

 private:
  bool launch(const QuantizedMlp& how, at::Tensor& d) const {
    const Matrix no_bias;
    std::optional<Quantized> of_x, of_hidden;
    Matrix values, scales;
    if (!quantize_rows(how.of_x, gate_up->scalar_type(), device, rows, nullptr, of_x, values, scales)) return false;
    Results hidden, result;
    if (!cutegemm::compute(how.hidden, device, {&values, &first, &no_bias, &scales, &first_scale}, {}, hidden))
      return false;
    values = {}, scales = {};
    values.data = hidden[0].const_data_ptr();
    if (hidden.size() > 1) scales.data = hidden[1].const_data_ptr();
    if (how.of_hidden &&
        !quantize_rows(*how.of_hidden, down->scalar_type(), device, values, nullptr, of_hidden, values, scales))
      return false;
    at::DimVector shape(x->sizes());
    shape.back() = how.result.results[0].shape.back();
    if (!cutegemm::compute(
            how.result, device, {&values, &second, &no_bias, &scales, &second_scale}, {}, result, shape))
      return false;
    d = std::move(result[0]);
    return true;
  }
};

// The operator quantized_mlp, whose hook in Python is called as hook(keys, unknown, *arguments).
template <typename... Texts>
at::Tensor quantized_mlp_by_operator(
    FromOperator from, const at::Tensor& x, const at::Tensor& gate_up, const at::Tensor& scale_gate_up,
    const at::Tensor& down, const at::Tensor& scale_down, Text scaling, Text activation, Texts... how) {
  QuantizedMlpCall of{&x, &gate_up, &scale_gate_up, &down, &scale_down};
  of.scaling = scalings.find(scaling), of.options.activation = layer_activations.find(activation);
  int field = 0;
  (of.options.take(field++, how), ...);
  Found found = Found::python;
  if (from.is_plain() && !of.records() && of.describe()) {
    at::Tensor d;
    found = of.compute(d);
    if (found == Found::launch) return d;
  }
  WithInterpreter held;
  std::vector<PyObject*> given{
      from.to_python(), to_python(found == Found::unknown), to_python(x), to_python(gate_up), to_python(scale_gate_up),
      to_python(down), to_python(scale_down), to_python(OptionalText(scaling)), to_python(OptionalText(activation))};
  (given.push_back(to_python(OptionalText(how))), ...);
  return taken(call(in_python::quantized_mlp, given));
}

inline const Operator serves_quantized_mlp = served_by<quantized_mlp_by_operator<OPTION_TYPES>>("quantized_mlp");

// x, gate_up, scale_gate_up, down, scale_down, scaling, activation, *how
constexpr Py_ssize_t QUANTIZED_MLP_ARGUMENTS = 7 + FIELDS;

inline bool read(PyObject* const* args, QuantizedMlpCall& of) {
  const at::Tensor** tensors[] = {&of.x, &of.gate_up, &of.scale_gate_up, &of.down, &of.scale_down};
  for (size_t i = 0; i < std::size(tensors); ++i)
    if (!read_tensor(args[i], *tensors[i]) || !*tensors[i]) return false;
  return read_name(args[5], scalings, of.scaling) && read_name(args[6], layer_activations, of.options.activation) &&
         read_how(args + 7, FIELDS, of.options) && of.describe();
}

// quantized_mlp(<as above>) -> D
inline PyObject* quantized_mlp(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  QuantizedMlpCall of;
  if (count != QUANTIZED_MLP_ARGUMENTS || state_of_thread() != Thread::plain || !read(args, of) || of.records())
    Py_RETURN_NONE;
  return answered([&](at::Tensor& d) { return of.compute(d); });
  END_HANDLE_TH_ERRORS
}

// install_quantized_mlp(<as above>, how): how is None, or (how x is quantized, the first product, None or how its
// result is quantized, the second product), as `read_quantization` and `read_program` have them. Where the first product
// quantizes, its second result is the scales.
inline PyObject* install_quantized_mlp(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  QuantizedMlpCall of;
  if (count != QUANTIZED_MLP_ARGUMENTS + 1 || !read(args, of)) Py_RETURN_FALSE;
  std::shared_ptr<QuantizedMlp> known;
  if (args[QUANTIZED_MLP_ARGUMENTS] != Py_None) {
    known = std::make_shared<QuantizedMlp>();
    PyObject *of_x = nullptr, *hidden = nullptr, *of_hidden = nullptr, *result = nullptr;
    if (!PyArg_ParseTuple(args[QUANTIZED_MLP_ARGUMENTS], "OOOO", &of_x, &hidden, &of_hidden, &result))
      throw_python_error();
    read_quantization(of_x, known->of_x);
    read_program(hidden, known->hidden), read_program(result, known->result);
    if (of_hidden != Py_None) read_quantization(of_hidden, known->of_hidden.emplace());
    TORCH_CHECK(known->of_x.scales && (!known->of_hidden || known->of_hidden->scales), "cutegemm: expected new scales");
    TORCH_CHECK(known->of_hidden || known->hidden.results.size() == 2, "cutegemm: expected scales of the hidden layer");
  }
  table_of<QuantizedMlp>().put(of.key(), std::move(known));
  Py_RETURN_TRUE;
  END_HANDLE_TH_ERRORS
}

inline const Methods of_quantized_mlp{
    {"quantized_mlp", quantized_mlp}, {"install_quantized_mlp", install_quantized_mlp}};

// -- 16 and 32 bits ----------------------------------------------------------------------------------------------------

// program: the number of the gating, an epilogue of the first product.
struct GatedMlp {
  const at::Tensor *x = nullptr, *gate_up = nullptr, *down = nullptr;
  int64_t program = 0;
  Options options;

  bool records() const { return !nothing_recorded({x, gate_up, down}); }

  // Where both products are known.
  Found compute(at::Tensor& d) const {
    const at::ScalarType dtype = x->scalar_type();
    if (c10::elementSize(dtype) < 2 || gate_up->scalar_type() != dtype || down->scalar_type() != dtype)
      return Found::python;  // `nn.SwiGLU` refuses these, also where `gemm` has a launch for them
    ToProgram first;
    Operands second;
    first.program = program, first.options = options, first.device = second.device = x->device().index();
    if (!describe_rows(*x, first.a) || !describe(*gate_up, first.b) || !describe(*down, second.b) || first.a.dim != 2 ||
        first.b.dim != 2 || second.b.dim != 2 || gate_up->device() != x->device() || down->device() != x->device())
      return Found::python;
    first.b = first.b.turned(), second.b = second.b.turned();
    Key key;
    Table<OfProgram>::Known gated;
    Known product;
    if (!key_of(first, key)) return Found::python;
    Found found = table_of<OfProgram>().find(key, gated);
    if (found != Found::launch) return found;
    if (gated->results.size() != 1) return Found::python;
    second.a.data = ALIGNED, second.a.dim = 2, second.a.dtype = gated->results[0].dtype;
    second.a.sizes = {gated->results[0].shape[0], gated->results[0].shape[1]};
    second.a.strides = {second.a.sizes[1], 1};
    found = look_up(second, 0, options, product);
    if (found != Found::launch) return found;
    // Python computes both where it must enqueue the second one.
    Results hidden;
    if (!Destination().find(*product, second.device) ||
        !cutegemm::compute(*gated, first.device, {&first.a, &first.b}, {}, hidden))
      return Found::python;
    second.a.data = hidden[0].const_data_ptr();
    at::DimVector shape(x->sizes());
    shape.back() = down->size(0);
    auto made = multiply(*product, second, 1, 0, shape);
    if (!made) return Found::python;
    d = std::move(*made);
    return Found::launch;
  }

 private:
  // In place of the address of a new tensor, of which a key holds the low bits alone.
  static inline const void* const ALIGNED = reinterpret_cast<const void*>(64);
};

// gated_mlp(x, gate_up, down, program, *how) -> D
inline PyObject* gated_mlp(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  GatedMlp of;
  if (count != 4 + FIELDS || state_of_thread() != Thread::plain) Py_RETURN_NONE;
  const at::Tensor** tensors[] = {&of.x, &of.gate_up, &of.down};
  for (size_t i = 0; i < std::size(tensors); ++i)
    if (!read_tensor(args[i], *tensors[i]) || !*tensors[i]) Py_RETURN_NONE;
  of.program = PyLong_AsLongLong(args[3]);
  if (PyErr_Occurred()) throw_python_error();
  if (!read_how(args + 4, FIELDS, of.options) || of.records()) Py_RETURN_NONE;
  return answered([&](at::Tensor& d) { return of.compute(d); });
  END_HANDLE_TH_ERRORS
}

inline const Methods of_gated_mlp{{"gated_mlp", gated_mlp}};

}  // namespace cutegemm
