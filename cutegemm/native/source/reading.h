// What Python passes to the functions of this module.
#pragma once

#include "quantize.h"

namespace cutegemm {

// A call's answer other than its result: None where Python computes it, NotImplemented where nobody has told how such a
// call is launched: Python then computes it, and tells.
inline PyObject* answer_of(Found found) {
  return Py_NewRef(found == Found::unknown ? Py_NotImplemented : Py_None);
}

// The answer of compute(d), which fills in the result without the interpreter.
template <typename Compute>
PyObject* answered(Compute compute) {
  at::Tensor d;
  Found found;
  {
    const WithoutInterpreter released;
    found = compute(d);
  }
  return found == Found::launch ? THPVariable_Wrap(std::move(d)) : answer_of(found);
}

// False for what is neither None nor a tensor of torch's own classes.
inline bool read_tensor(PyObject* object, const at::Tensor*& tensor) {
  if (object == Py_None) return true;
  if (!THPVariable_CheckExact(object)) return false;
  tensor = &THPVariable_Unpack(object);
  return true;
}

// False for what is no text, or none that UTF-8 has.
inline bool read_text(PyObject* object, Text& text) {
  if (!PyUnicode_CheckExact(object)) return false;
  Py_ssize_t size = 0;
  const char* start = PyUnicode_AsUTF8AndSize(object, &size);
  if (start == nullptr) {
    PyErr_Clear();
    return false;
  }
  text = Text(start, static_cast<size_t>(size));
  return true;
}

inline bool read_name(PyObject* object, const Names& names, int& place) {
  if (object == Py_None) return (place = names.none) >= 0;
  Text text;
  if (!read_text(object, text)) return false;
  place = names.find(text);
  return place >= 0;
}

// The first `count` fields of `How`; the others are None.
inline bool read_how(PyObject* const* args, Py_ssize_t count, Options& options) {
  for (Py_ssize_t i = 0; i < count; ++i)
    if (!read_name(args[i], accepted[i], options.how[i])) return false;
  return true;
}

inline bool read_number(PyObject* object, double& number) {
  if (!PyFloat_CheckExact(object)) return false;
  number = PyFloat_AS_DOUBLE(object);
  return std::abs(number) <= FLT_MAX;
}

inline bool read_dtype(PyObject* object, int& dtype) {
  if (object == Py_None) return true;
  if (!THPDtype_Check(object)) return false;
  dtype = static_cast<int>(reinterpret_cast<THPDtype*>(object)->scalar_type);
  return true;
}

// The numbers of a tuple.
inline std::vector<int64_t> numbers_of(PyObject* tuple) {
  TORCH_CHECK(PyTuple_Check(tuple), "cutegemm: expected a tuple of integers");
  std::vector<int64_t> made;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tuple); ++i) {
    const int64_t number = PyLong_AsLongLong(PyTuple_GET_ITEM(tuple, i));
    if (number == -1 && PyErr_Occurred()) throw_python_error();
    made.push_back(number);
  }
  return made;
}

// The fields of a `Launcher` (cutegemm/native/__init__.py), the first ones of a tuple.
inline void read_launch(PyObject* fields, Launch& launch) {
  TORCH_CHECK(PyTuple_Check(fields) && PyTuple_GET_SIZE(fields) >= 4, "cutegemm: expected the fields of a launcher");
  const auto number = [&](Py_ssize_t i) {
    const unsigned long long found = PyLong_AsUnsignedLongLong(PyTuple_GET_ITEM(fields, i));
    if (PyErr_Occurred()) throw_python_error();
    return found;
  };
  launch.launcher = reinterpret_cast<Launcher>(number(0));
  launch.words = static_cast<int64_t>(number(1)), launch.parts = static_cast<int64_t>(number(2));
  for (int64_t value : numbers_of(PyTuple_GET_ITEM(fields, 3))) launch.behind.push_back(Value::of(value));
}

inline void read_launches(PyObject* tuple, std::vector<Launch>& launches) {
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tuple); ++i)
    read_launch(PyTuple_GET_ITEM(tuple, i), launches.emplace_back());
}

// (*launcher, shape, dtype, swapped)
inline void read_product(PyObject* fields, Product& product) {
  read_launch(fields, product);
  TORCH_CHECK(PyTuple_GET_SIZE(fields) == 7, "cutegemm: expected a launch, shape, dtype and swapped");
  product.shape = numbers_of(PyTuple_GET_ITEM(fields, 4));
  int dtype = -1;
  TORCH_CHECK(read_dtype(PyTuple_GET_ITEM(fields, 5), dtype) && dtype >= 0, "cutegemm: expected a torch.dtype");
  product.dtype = static_cast<at::ScalarType>(dtype);
  product.swapped = PyObject_IsTrue(PyTuple_GET_ITEM(fields, 6)) == 1;
}

// (*launcher, addresses as (tensor, offset), numbers as (given, constant), results as (shape, dtype)); `ProgramLaunch`.
inline void read_program(PyObject* fields, ProgramLaunch& program) {
  read_launch(fields, program);
  TORCH_CHECK(PyTuple_GET_SIZE(fields) == 7, "cutegemm: expected a launch, addresses, numbers and results");
  const auto each_of = [](PyObject* tuple, auto read) {
    TORCH_CHECK(PyTuple_Check(tuple), "cutegemm: expected a tuple");
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tuple); ++i)
      if (!read(PyTuple_GET_ITEM(tuple, i))) throw_python_error();
  };
  each_of(PyTuple_GET_ITEM(fields, 4), [&](PyObject* pair) {
    auto& place = program.addresses.emplace_back();
    long long offset = 0;
    const bool right = PyArg_ParseTuple(pair, "iL", &place.tensor, &offset);
    place.offset = offset;
    return right;
  });
  each_of(PyTuple_GET_ITEM(fields, 5), [&](PyObject* pair) {
    auto& number = program.numbers.emplace_back();
    return PyArg_ParseTuple(pair, "id", &number.given, &number.constant) != 0;
  });
  each_of(PyTuple_GET_ITEM(fields, 6), [&](PyObject* pair) {
    auto& result = program.results.emplace_back();
    PyObject *shape = nullptr, *of = nullptr;
    int dtype = -1;
    if (!PyArg_ParseTuple(pair, "OO", &shape, &of)) return false;
    TORCH_CHECK(read_dtype(of, dtype) && dtype >= 0, "cutegemm: expected a torch.dtype");
    result.shape = numbers_of(shape), result.dtype = static_cast<at::ScalarType>(dtype);
    return true;
  });
}

// (launchers, shape and strides of the values, shape of the scales or None, number of maxima)
inline void read_quantization(PyObject* fields, Quantization& made) {
  PyObject *steps = nullptr, *shape = nullptr, *strides = nullptr, *scales = nullptr;
  long long maxima = 0;
  if (!PyArg_ParseTuple(fields, "O!OOOL", &PyTuple_Type, &steps, &shape, &strides, &scales, &maxima))
    throw_python_error();
  read_launches(steps, made.steps);
  made.shape = numbers_of(shape), made.strides = numbers_of(strides), made.maxima = maxima;
  if (scales != Py_None) made.scales = numbers_of(scales);
}

inline Names names_of(PyObject* tuple) {
  TORCH_CHECK(PyTuple_Check(tuple) && PyTuple_GET_SIZE(tuple) < 16, "cutegemm: expected a tuple of at most 15");
  Names made;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tuple); ++i) {
    PyObject* name = PyTuple_GET_ITEM(tuple, i);
    if (name == Py_None) {
      made.none = 0;
      continue;
    }
    const char* text = PyUnicode_AsUTF8(name);
    if (text == nullptr) throw_python_error();
    made.known.emplace_back(text);
  }
  return made;
}

}  // namespace cutegemm
