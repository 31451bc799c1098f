// The functions that `gemm` with an epilogue or scales, `quantize` and `nn.Fp8Linear` ask first.
#pragma once

#include "layer.h"
#include "reading.h"

namespace cutegemm {

constexpr Py_ssize_t TO_QUANTIZE = 5, TO_SCALE = 7 + FIELDS;

// x, dtype, scaling, scale, backend
inline bool read(PyObject* const* args, const at::Tensor*& x, const at::Tensor*& scale, ToQuantize& of) {
  int dtype = -1;
  if (!read_tensor(args[0], x) || !x || !read_dtype(args[1], dtype) || dtype < 0 ||
      !read_name(args[2], scalings, of.scaling) || !read_tensor(args[3], scale) ||
      !read_name(args[4], quantizers, of.backend) || (scale && of.scaling != 0))
    return false;
  of.dtype = static_cast<at::ScalarType>(dtype);
  return of.describe(*x, scale);
}

// quantize(x, dtype, scaling, scale, backend) -> (values, scales)
inline PyObject* quantize(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  const at::Tensor *x = nullptr, *scale = nullptr;
  ToQuantize of;
  if (count != TO_QUANTIZE || state_of_thread() != Thread::plain || !read(args, x, scale, of) ||
      !nothing_recorded({x, scale}))
    Py_RETURN_NONE;
  std::optional<Quantized> made;
  Found found;
  {
    const WithoutInterpreter released;
    found = quantized(of, scale, made);
  }
  if (found != Found::launch) return answer_of(found);
  PyObject* pair = checked(PyTuple_New(2));
  PyTuple_SET_ITEM(pair, 0, checked(THPVariable_Wrap(std::move(made->values))));
  PyTuple_SET_ITEM(pair, 1, scale ? Py_NewRef(args[3]) : checked(THPVariable_Wrap(std::move(made->scales))));
  return pair;
  END_HANDLE_TH_ERRORS
}

// install_quantize(<arguments of quantize>, how): how is None or as `read_quantization` has it.
inline PyObject* install_quantize(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  const at::Tensor *x = nullptr, *scale = nullptr;
  ToQuantize of;
  if (count != TO_QUANTIZE + 1 || !read(args, x, scale, of)) Py_RETURN_FALSE;
  std::shared_ptr<Quantization> known;
  if (args[TO_QUANTIZE] != Py_None) {
    known = std::make_shared<Quantization>();
    read_quantization(args[TO_QUANTIZE], *known);
    TORCH_CHECK(known->scales.has_value() != (scale != nullptr), "cutegemm: expected new scales or given ones");
  }
  table_of<Quantization>().put(key_of(of), std::move(known));
  Py_RETURN_TRUE;
  END_HANDLE_TH_ERRORS
}

inline const Methods of_quantize{{"quantize", quantize}, {"install_quantize", install_quantize}};

// program, a, b, operands, out_dtype, *how. program: a number, or the text that an operator carries.
constexpr Py_ssize_t TO_PROGRAM = 5 + FIELDS;

struct AskedProgram {
  c10::SmallVector<const at::Tensor*, 8> tensors;
  ToProgram of;
  int64_t integers = 0;

  bool read(PyObject* const* args) {
    const at::Tensor *a = nullptr, *b = nullptr;
    if (!read_number_of_program(args[0]) || !read_tensor(args[1], a) || !a || !read_tensor(args[2], b) || !b ||
        !read_dtype(args[4], of.options.out_dtype) || !read_how(args + 5, FIELDS, of.options) || !of.describe(*a, *b))
      return false;
    tensors.append({a, b});
    PyObject* operands = args[3];
    const bool is_list = PyList_CheckExact(operands);
    if (!is_list && !PyTuple_CheckExact(operands)) return false;
    const Py_ssize_t count = is_list ? PyList_GET_SIZE(operands) : PyTuple_GET_SIZE(operands);
    if (count > 20) return false;
    for (Py_ssize_t i = 0; i < count; ++i) {
      PyObject* each = is_list ? PyList_GET_ITEM(operands, i) : PyTuple_GET_ITEM(operands, i);
      if (!read_operand(each, i)) return false;
    }
    return true;
  }

 private:
  bool read_number_of_program(PyObject* object) {
    if (PyUnicode_CheckExact(object)) {
      Py_ssize_t size = 0;
      const char* text = PyUnicode_AsUTF8AndSize(object, &size);
      if (text == nullptr) throw_python_error();
      of.program = number_of(Text(text, static_cast<size_t>(size)));
      return true;
    }
    of.program = PyLong_AsLongLong(object);
    if (PyErr_Occurred()) throw_python_error();
    return true;
  }

  bool read_operand(PyObject* object, Py_ssize_t i) {
    if (PyFloat_CheckExact(object)) {
      of.order |= int64_t{1} << (3 * i);
      return of.add(PyFloat_AS_DOUBLE(object));
    }
    if (PyLong_CheckExact(object)) {
      int overflow = 0;
      const int64_t number = PyLong_AsLongLongAndOverflow(object, &overflow);
      of.order |= int64_t{2} << (3 * i), ++integers;
      return overflow == 0 && of.add(number);
    }
    const at::Tensor* tensor = nullptr;
    if (!read_tensor(object, tensor) || !tensor) return false;
    tensors.push_back(tensor);
    return of.add(*tensor);
  }
};

// program(<as above>) -> the result, or a tuple of them
inline PyObject* program(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  AskedProgram asked;
  if (count != TO_PROGRAM || state_of_thread() != Thread::plain || !asked.read(args) ||
      !nothing_recorded(asked.tensors))
    Py_RETURN_NONE;
  Results made;
  Found found;
  {
    const WithoutInterpreter released;
    found = computed(asked.of, made);
  }
  if (found != Found::launch) return answer_of(found);
  if (made.size() == 1) return THPVariable_Wrap(std::move(made[0]));
  PyObject* results = checked(PyTuple_New(static_cast<Py_ssize_t>(made.size())));
  for (size_t i = 0; i < made.size(); ++i)
    PyTuple_SET_ITEM(results, static_cast<Py_ssize_t>(i), checked(THPVariable_Wrap(std::move(made[i]))));
  return results;
  END_HANDLE_TH_ERRORS
}

// install_program(<as above>, launch): launch is None or as `read_program` has it. For an operator its floats stand in
// front of its integers, among the operands behind the tensors.
inline PyObject* install_program(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  AskedProgram asked;
  Key key;
  if (count != TO_PROGRAM + 1 || !asked.read(args)) Py_RETURN_FALSE;
  if (asked.of.program < 0) asked.of.order = asked.integers;
  if (asked.of.program == 0 || !key_of(asked.of, key)) Py_RETURN_FALSE;
  std::shared_ptr<OfProgram> known;
  if (args[TO_PROGRAM] != Py_None) {
    known = std::make_shared<OfProgram>();
    read_program(args[TO_PROGRAM], *known);
  }
  table_of<OfProgram>().put(key, std::move(known));
  Py_RETURN_TRUE;
  END_HANDLE_TH_ERRORS
}

inline const Methods of_program{{"program", program}, {"install_program", install_program}};

// a, b, scale_a, scale_b, bias, activation, out_dtype, *how
struct AskedScaled {
  const at::Tensor *a = nullptr, *b = nullptr, *scale_a = nullptr, *scale_b = nullptr, *bias = nullptr;
  Options options;
  ToScale of;

  bool read(PyObject* const* args, bool of_layer) {
    return read_tensor(args[0], a) && a && read_tensor(args[1], b) && b && read_tensor(args[2], scale_a) &&
           read_tensor(args[3], scale_b) && read_tensor(args[4], bias) &&
           read_name(args[5], of_layer ? layer_activations : activations, options.activation) &&
           read_dtype(args[6], options.out_dtype) && read_how(args + 7, FIELDS, options) &&
           of.describe(a, b, scale_a, scale_b, bias);
  }

  bool records() const { return !nothing_recorded({a, b, scale_a, scale_b, bias}); }
};

// scaled(a, b, scale_a, scale_b, bias, activation, out_dtype, *how) -> D
inline PyObject* scaled(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  AskedScaled asked;
  if (count != TO_SCALE || state_of_thread() != Thread::plain || !asked.read(args, false) ||
      asked.records())
    Py_RETURN_NONE;
  return answered([&](at::Tensor& d) { return scaled_product(asked.of, asked.options, d); });
  END_HANDLE_TH_ERRORS
}

// install_scaled(<arguments of scaled>, launch): launch is None or as `read_program` has it. The activation may be a
// gated one.
inline PyObject* install_scaled(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  AskedScaled asked;
  if (count != TO_SCALE + 1 || !asked.read(args, true)) Py_RETURN_FALSE;
  std::shared_ptr<ScaledProduct> known;
  if (args[TO_SCALE] != Py_None) {
    known = std::make_shared<ScaledProduct>();
    read_program(args[TO_SCALE], *known);
  }
  table_of<ScaledProduct>().put(key_of(asked.of, asked.options), std::move(known));
  Py_RETURN_TRUE;
  END_HANDLE_TH_ERRORS
}

inline const Methods of_scaled{{"scaled", scaled}, {"install_scaled", install_scaled}};

// quantized_linear(x, weight, weight_scale, input_scale, bias, scaling, activation, *how) -> D. scaling: of x.
inline PyObject* quantized_linear(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  Layer layer;
  if (count != 7 + FIELDS || state_of_thread() != Thread::plain || !read_tensor(args[0], layer.x) || !layer.x ||
      !read_tensor(args[1], layer.weight) || !layer.weight || !read_tensor(args[2], layer.weight_scale) ||
      !layer.weight_scale || !read_tensor(args[3], layer.input_scale) || !read_tensor(args[4], layer.bias) ||
      !read_name(args[5], scalings, layer.scaling) || !read_name(args[6], layer_activations, layer.options.activation) ||
      !read_how(args + 7, FIELDS, layer.options) || layer.records())
    Py_RETURN_NONE;
  return answered([&](at::Tensor& d) { return layer.compute(d); });
  END_HANDLE_TH_ERRORS
}

inline const Methods of_quantized_linear{{"quantized_linear", quantized_linear}};

}  // namespace cutegemm
