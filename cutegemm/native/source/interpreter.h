// Calls into Python, from threads that may or may not hold the interpreter's lock.
#pragma once

#include <torch/csrc/autograd/python_variable.h>

#include <torch/csrc/Dtype.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include "plain.h"

namespace cutegemm {

// A function in Python, which `configure` finds by this name in what it is given: `in_python` of
// cutegemm/native/__init__.py. Those here stand in the namespace in_python, too.
class Hook {
 public:
  explicit Hook(const char* name) : name(name) { all().push_back(this); }
  Hook(const Hook&) = delete;
  Hook& operator=(const Hook&) = delete;

  static std::vector<Hook*>& all() { return kept<std::vector<Hook*>>(); }

  const char* const name;
  PyObject* function = nullptr;  // never freed
};

class WithInterpreter {
 public:
  WithInterpreter() : state_(PyGILState_Ensure()) {}
  ~WithInterpreter() { PyGILState_Release(state_); }
  WithInterpreter(const WithInterpreter&) = delete;
  WithInterpreter& operator=(const WithInterpreter&) = delete;

 private:
  PyGILState_STATE state_;
};

class WithoutInterpreter {
 public:
  WithoutInterpreter() : state_(PyEval_SaveThread()) {}
  ~WithoutInterpreter() { PyEval_RestoreThread(state_); }
  WithoutInterpreter(const WithoutInterpreter&) = delete;
  WithoutInterpreter& operator=(const WithoutInterpreter&) = delete;

 private:
  PyThreadState* state_;
};

[[noreturn]] inline void throw_python_error() {
  python_error error;
  error.persist();
  throw error;
}

// A new reference, or an exception of C++.
inline PyObject* checked(PyObject* object) {
  if (object == nullptr) throw_python_error();
  return object;
}

inline PyObject* none() { return Py_NewRef(Py_None); }

inline PyObject* to_python(const at::Tensor& tensor) {
  return tensor.defined() ? checked(THPVariable_Wrap(tensor)) : none();
}

using OptionalTensor = std::optional<at::Tensor>;

inline PyObject* to_python(const OptionalTensor& tensor) { return tensor ? to_python(*tensor) : none(); }

inline PyObject* to_python(const OptionalText& text) {
  return text ? checked(PyUnicode_FromStringAndSize(text->data(), static_cast<Py_ssize_t>(text->size()))) : none();
}

inline PyObject* to_python(std::optional<at::ScalarType> dtype) {
  if (!dtype) return none();
  return Py_NewRef(reinterpret_cast<PyObject*>(torch::getTHPDtype(*dtype)));
}

inline PyObject* to_python(double number) { return checked(PyFloat_FromDouble(number)); }
inline PyObject* to_python(bool truth) { return PyBool_FromLong(truth); }
inline PyObject* to_python(uint64_t number) { return checked(PyLong_FromUnsignedLongLong(number)); }
inline PyObject* to_python(int64_t number) { return checked(PyLong_FromLongLong(number)); }

inline PyObject* to_python(const c10::SymInt& number) {
  if (const auto known = number.maybe_as_int()) return to_python(*known);
  return py::cast(number).release().ptr();
}

template <typename Each>
PyObject* to_python_tuple(const Each& each) {
  PyObject* made = checked(PyTuple_New(static_cast<Py_ssize_t>(each.size())));
  for (size_t i = 0; i < each.size(); ++i) PyTuple_SET_ITEM(made, static_cast<Py_ssize_t>(i), to_python(each[i]));
  return made;
}

inline PyObject* to_python(c10::IntArrayRef numbers) { return to_python_tuple(numbers); }
inline PyObject* to_python(c10::ArrayRef<double> numbers) { return to_python_tuple(numbers); }
inline PyObject* to_python(at::TensorList tensors) { return to_python_tuple(tensors); }
inline PyObject* to_python(c10::SymIntArrayRef numbers) { return to_python_tuple(numbers); }

inline PyObject* to_python(const OptionalTexts& texts) {
  if (!texts) return none();
  PyObject* made = checked(PyTuple_New(static_cast<Py_ssize_t>(texts->size())));
  for (size_t i = 0; i < texts->size(); ++i) {
    const std::string text = texts->get(i);
    PyTuple_SET_ITEM(made, static_cast<Py_ssize_t>(i), to_python(OptionalText(Text(text))));
  }
  return made;
}

inline PyObject* name_of(const Names& names, int place) {
  return place == 0 ? none() : to_python(OptionalText(names.known[place - 1]));
}

// A call of an operator below all modes, or above with the keys that it was called with.
struct FromOperator {
  const c10::DispatchKeySet* keys = nullptr;

  bool is_plain() const {
    return keys == nullptr || ((*keys & c10::after_autograd_keyset).raw_repr() == served.plain() &&
                               state_of_thread() == Thread::plain);
  }

  PyObject* to_python() const { return keys ? cutegemm::to_python(keys->raw_repr()) : none(); }
};

// hook(*arguments), a new reference; the arguments are references that it takes over.
inline PyObject* call(const Hook& hook, const std::vector<PyObject*>& arguments) {
  PyObject* result = PyObject_Vectorcall(hook.function, arguments.data(), arguments.size(), nullptr);
  for (PyObject* argument : arguments) Py_DECREF(argument);
  return checked(result);
}

// The tensor of a new reference, which is given back.
inline at::Tensor taken(PyObject* object) {
  at::Tensor tensor;
  const bool is_tensor = THPVariable_Check(object);
  if (is_tensor) tensor = THPVariable_Unpack(object);
  const bool right = is_tensor || object == Py_None;
  Py_DECREF(object);
  TORCH_CHECK(right, "cutegemm: Python gave something else than a tensor");
  return tensor;
}

// The tensors of a new reference to a list, which is given back.
inline std::vector<at::Tensor> taken_list(PyObject* object) {
  std::vector<at::Tensor> made;
  const Py_ssize_t count = PySequence_Size(object);
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* each = PySequence_GetItem(object, i);
    if (each == nullptr) break;
    made.push_back(taken(each));
  }
  Py_DECREF(object);
  if (PyErr_Occurred()) throw_python_error();
  return made;
}

// The two tensors of a new reference to a pair, which is given back.
inline std::tuple<at::Tensor, at::Tensor> taken_pair(PyObject* object) {
  PyObject *first = PySequence_GetItem(object, 0), *second = first ? PySequence_GetItem(object, 1) : nullptr;
  Py_DECREF(object);
  if (second == nullptr) {
    Py_XDECREF(first);
    throw_python_error();
  }
  at::Tensor one = taken(first);  // the arguments of a constructor have no order
  return {std::move(one), taken(second)};
}

}  // namespace cutegemm
