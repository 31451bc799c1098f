// The functions that cutegemm.gemm and cutegemm.linear ask first; see cutegemm/native/__init__.py.
#include <dlfcn.h>

#include <ATen/autocast_mode.h>

#include "calls.h"
#include "grouped.h"
#include "mixture.h"
#include "mlp.h"
#include "operator.h"

namespace cutegemm {
namespace {

// Two answers beside a tensor: None, Python computes this call; and, inside, that nobody has planned it yet.
enum class Answer { tensor, python, unknown };

// A call as Python makes it. Tensors are borrowed, or those that autocast made.
struct Asked {
  std::array<const at::Tensor*, 5> tensors{};  // a, b, c, bias, out
  std::array<at::Tensor, 4> cast;
  Options options;
  double alpha = 1, beta = 0;
  bool is_linear = false;

  const at::Tensor*& a() { return tensors[0]; }
  const at::Tensor*& b() { return tensors[1]; }
  const at::Tensor*& c() { return tensors[2]; }
  const at::Tensor*& bias() { return tensors[3]; }
  const at::Tensor*& out() { return tensors[4]; }
};

constexpr Py_ssize_t ARGUMENTS = 9 + FIELDS;

// The arguments of `gemm` as `call.description` has them, alpha before beta. False where Python must look at them.
bool read(PyObject* const* args, Py_ssize_t count, Asked& asked) {
  return count == ARGUMENTS && read_tensor(args[0], asked.a()) && asked.a() && read_tensor(args[1], asked.b()) &&
         asked.b() && read_tensor(args[2], asked.c()) && read_number(args[3], asked.alpha) &&
         read_number(args[4], asked.beta) && read_tensor(args[5], asked.bias()) &&
         read_name(args[6], activations, asked.options.activation) && read_tensor(args[7], asked.out()) &&
         read_dtype(args[8], asked.options.out_dtype) && read_how(args + 9, FIELDS, asked.options);
}

bool read_operands(Asked& asked, Operands& of) {
  of.device = asked.a()->device().index();
  Matrix* matrices[] = {&of.a, &of.b, &of.c, &of.bias, &of.out};
  for (size_t i = 0; i < asked.tensors.size(); ++i) {
    const at::Tensor* tensor = asked.tensors[i];
    if (tensor == nullptr) continue;
    const bool is_rows = asked.is_linear && i == 0;
    if (!(is_rows ? describe_rows(*tensor, *matrices[i]) : describe(*tensor, *matrices[i])) ||
        tensor->device().index() != of.device)
      return false;
  }
  if (!asked.is_linear) return true;
  if (of.b.dim != 2 || (of.bias && of.bias.dim != 1)) return false;
  of.b = of.b.turned();
  return true;
}

// As torch.mm casts its operands, where autocast is on for their kind of device.
void cast_operands(Asked& asked) {
  const at::ScalarType dtype = at::autocast::get_autocast_dtype(served.type);
  if (asked.a()->scalar_type() == at::ScalarType::Float && dtype != at::ScalarType::Float)
    asked.options.how[PRECISION] = 0;
  for (size_t i = 0; i < asked.cast.size(); ++i) {
    const at::Tensor* tensor = asked.tensors[i];
    if (tensor == nullptr || !tensor->is_floating_point() || tensor->scalar_type() == at::ScalarType::Double ||
        tensor->device().type() != served.type)
      continue;
    asked.cast[i] = tensor->to(dtype);
    asked.tensors[i] = &asked.cast[i];
  }
}

// Whether the result may be written there: an input that lies there too is for Python to judge.
bool may_write(const Asked& asked, const Operands& of) {
  return !asked.tensors[4]->is_inference() && !of.out.overlaps(of.a) && !of.out.overlaps(of.b) &&
         !(of.c && asked.beta != 0 && of.out.overlaps(of.c)) && !(of.bias && of.out.overlaps(of.bias));
}

const at::Tensor& or_undefined(const at::Tensor* tensor) {
  static const at::Tensor* none = new at::Tensor;
  return tensor ? *tensor : *none;
}

// `result` of a call whose thread is plain, or has autocast excluded.
Answer computed(Asked& asked, at::Tensor& result) {
  const bool records = to_be_recorded(asked.tensors);
  if ((records && (asked.out() || !may_record(asked.options, *asked.a()))) || has_tangent(asked.tensors))
    return Answer::python;
  Operands of;
  if (!read_operands(asked, of)) return Answer::python;
  if (asked.out() && !may_write(asked, of)) return Answer::python;
  Known launch;
  const Found found = look_up(of, asked.beta, asked.options, launch);
  if (found != Found::launch) return found == Found::unknown ? Answer::unknown : Answer::python;
  if (asked.out()) {
    asked.out()->unsafeGetTensorImpl()->bump_version();
    if (!enqueue(*launch, of, of.out.data, asked.alpha, asked.beta)) return Answer::python;
    result = *asked.out();
    return Answer::tensor;
  }
  at::DimVector shape(launch->shape.begin(), launch->shape.end());
  if (asked.is_linear) {
    shape = asked.a()->sizes();
    shape.back() = of.b.sizes[1];
  }
  auto d = multiply(*launch, of, asked.alpha, asked.beta, shape);
  if (!d) return Answer::python;
  result = std::move(*d);
  if (records)
    record(result, *asked.a(), *asked.b(), or_undefined(asked.c()), or_undefined(asked.bias()),
           {asked.options, asked.alpha, asked.beta, asked.is_linear});
  return Answer::tensor;
}

Answer answer(Asked& asked, at::Tensor& result) {
  const Thread thread = state_of_thread();
  if (thread == Thread::other) return Answer::python;
  if (thread == Thread::plain) return computed(asked, result);
  const auto plain = [](const at::Tensor* tensor) { return tensor == nullptr || is_plain(*tensor); };
  if (asked.out() || asked.options.of_operands() || !plain(asked.a()) || !plain(asked.b()) ||
      !plain(asked.c()) || !plain(asked.bias()) || asked.a()->device() != asked.b()->device())
    return Answer::python;
  const c10::impl::ExcludeDispatchKeyGuard without(c10::autocast_dispatch_keyset);
  cast_operands(asked);
  return computed(asked, result);
}

// gemm(a, b, c, alpha, beta, bias, activation, out, out_dtype, *how)
PyObject* gemm(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  Asked asked;
  if (!read(args, count, asked)) Py_RETURN_NONE;
  at::Tensor result;
  Answer found;
  {
    const WithoutInterpreter released;
    found = answer(asked, result);
  }
  if (found == Answer::unknown && state_of_thread() == Thread::plain) {
    PyObject* arguments[1 + ARGUMENTS] = {Py_None};
    std::copy(args, args + ARGUMENTS, arguments + 1);
    Py_DECREF(checked(PyObject_Vectorcall(in_python::plan.function, arguments, 1 + ARGUMENTS, nullptr)));
    const WithoutInterpreter released;
    found = answer(asked, result);
  }
  if (found != Answer::tensor) Py_RETURN_NONE;
  if (asked.out()) return Py_NewRef(args[7]);
  return THPVariable_Wrap(std::move(result));
  END_HANDLE_TH_ERRORS
}

// linear(x, weight, bias, activation, *how), where the last ones may be left away. What nobody has planned, Python passes
// to `gemm`.
PyObject* linear(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  Asked asked;
  asked.is_linear = true;
  if (count < 4 || count - 4 > FIELDS || !read_tensor(args[0], asked.a()) || !asked.a() ||
      !read_tensor(args[1], asked.b()) || !asked.b() || !read_tensor(args[2], asked.bias()) ||
      !read_name(args[3], activations, asked.options.activation) || !read_how(args + 4, count - 4, asked.options))
    Py_RETURN_NONE;
  at::Tensor result;
  Answer found;
  {
    const WithoutInterpreter released;
    found = answer(asked, result);
  }
  if (found != Answer::tensor) Py_RETURN_NONE;
  return THPVariable_Wrap(std::move(result));
  END_HANDLE_TH_ERRORS
}

// install_gemm(<arguments of gemm>, launch): launch is None, or (launcher, words, parts, behind, shape, dtype, swapped).
// False for a call whose key this part does not know.
PyObject* install_gemm(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  Asked asked;
  Operands of;
  if (count != ARGUMENTS + 1 || !read(args, ARGUMENTS, asked) || !read_operands(asked, of)) Py_RETURN_FALSE;
  Known known;
  if (args[ARGUMENTS] != Py_None) {
    auto launch = std::make_shared<Product>();
    read_product(args[ARGUMENTS], *launch);
    known = std::move(launch);
  }
  table_of<Product>().put(key_of(of, asked.beta, asked.options), std::move(known));
  Py_RETURN_TRUE;
  END_HANDLE_TH_ERRORS
}

const Methods of_gemm{{"gemm", gemm}, {"linear", linear}, {"install_gemm", install_gemm}};

// forget(): of all calls.
PyObject* forget(PyObject*, PyObject*) {
  HANDLE_TH_ERRORS
  for (AnyTable* table : AnyTable::all()) table->clear();
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// leave_float32_to_python(): of the operator, the products that name no precision.
PyObject* leave_float32_to_python(PyObject*, PyObject*) {
  HANDLE_TH_ERRORS
  leaves_float32 = true;
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyObject* known(PyObject*, PyObject*) {
  HANDLE_TH_ERRORS
  size_t count = 0;
  for (const AnyTable* table : AnyTable::all()) count += table->size();
  return checked(PyLong_FromSize_t(count));
  END_HANDLE_TH_ERRORS
}

// lend(device, stream, memory, parts_at, words, parts)
PyObject* lend(PyObject*, PyObject* args) {
  HANDLE_TH_ERRORS
  int device = 0;
  unsigned long long stream = 0;
  PyObject* memory = nullptr;
  long long parts_at = 0, words = 0, parts = 0;
  if (!PyArg_ParseTuple(args, "iKOLLL", &device, &stream, &memory, &parts_at, &words, &parts)) throw_python_error();
  TORCH_CHECK(THPVariable_Check(memory), "cutegemm: expected a tensor");
  workspaces().put(device, reinterpret_cast<void*>(stream), {THPVariable_Unpack(memory), parts_at, words, parts});
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyObject* take_back(PyObject*, PyObject*) {
  HANDLE_TH_ERRORS
  workspaces().clear();
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// A function of a library that torch has loaded, or of the driver.
void* found_in(const char* library, const char* name) {
  void* handle = dlopen(library, RTLD_LAZY | RTLD_NOLOAD);
  void* address = handle ? dlsym(handle, name) : nullptr;
  TORCH_CHECK(address != nullptr, "cutegemm: no ", name, " in ", library);
  return address;
}

// configure(names, in_python, stream, capturing): once, first of all. names: what `activation`, the fields of `How`,
// `scaling` and `backend` of `quantize`, and `activation` of layers accept. in_python: a dict of functions. stream,
// capturing: 0 where CUDA tensors are served; else addresses of functions, and CPU tensors are.
PyObject* configure(PyObject*, PyObject* args) {
  HANDLE_TH_ERRORS
  PyObject *names = nullptr, *functions = nullptr;
  unsigned long long stream = 0, capturing = 0;
  TORCH_CHECK(in_python::plan.function == nullptr, "cutegemm: configured twice");
  if (!PyArg_ParseTuple(args, "O!O!KK", &PyTuple_Type, &names, &PyDict_Type, &functions, &stream, &capturing))
    throw_python_error();
  TORCH_CHECK(PyTuple_GET_SIZE(names) == 4 + FIELDS, "cutegemm: compiled for other options");
  for (const Hook* hook : Hook::all())
    TORCH_CHECK(PyDict_GetItemString(functions, hook->name), "cutegemm: Python has no function ", hook->name);
  for (Hook* hook : Hook::all()) hook->function = Py_NewRef(PyDict_GetItemString(functions, hook->name));
  activations = names_of(PyTuple_GET_ITEM(names, 0));
  for (int i = 0; i < FIELDS; ++i) accepted[i] = names_of(PyTuple_GET_ITEM(names, i + 1));
  scalings = names_of(PyTuple_GET_ITEM(names, FIELDS + 1)), quantizers = names_of(PyTuple_GET_ITEM(names, FIELDS + 2));
  layer_activations = names_of(PyTuple_GET_ITEM(names, FIELDS + 3));
  if (stream != 0) {
    served.type = c10::DeviceType::CPU, served.key = c10::DispatchKey::CPU;
    served.autograd = c10::DispatchKey::AutogradCPU, served.autocast = c10::DispatchKey::AutocastCPU;
    served.current_stream = reinterpret_cast<decltype(served.current_stream)>(stream);
    served.is_capturing = reinterpret_cast<decltype(served.is_capturing)>(capturing);
  } else {
    served.current_stream = reinterpret_cast<decltype(served.current_stream)>(
        found_in("libtorch_cuda.so", "aoti_torch_get_current_cuda_stream"));
    served.is_capturing =
        reinterpret_cast<decltype(served.is_capturing)>(found_in("libcuda.so.1", "cuStreamIsCapturing"));
  }
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// Serves the operators from now on; until `leave_operators`, which only tests call.
PyObject* serve_operators(PyObject*, PyObject*) {
  HANDLE_TH_ERRORS
  register_operators();
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyObject* leave_operators(PyObject*, PyObject*) {
  HANDLE_TH_ERRORS
  unregister_operators();
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

const Methods of_module{
    {"forget", forget, METH_NOARGS},
    {"known", known, METH_NOARGS},
    {"leave_float32_to_python", leave_float32_to_python, METH_NOARGS},
    {"lend", lend, METH_VARARGS},
    {"take_back", take_back, METH_NOARGS},
    {"configure", configure, METH_VARARGS},
    {"serve_operators", serve_operators, METH_NOARGS},
    {"leave_operators", leave_operators, METH_NOARGS},
};

PyModuleDef definition = {PyModuleDef_HEAD_INIT, "cutegemm_native", nullptr, -1, nullptr, nullptr, nullptr, nullptr,
                          nullptr};

}  // namespace
}  // namespace cutegemm

PyMODINIT_FUNC PyInit_cutegemm_native() {
  std::vector<PyMethodDef>& methods = cutegemm::Methods::all();
  if (cutegemm::definition.m_methods == nullptr) methods.push_back({nullptr, nullptr, 0, nullptr});
  cutegemm::definition.m_methods = methods.data();
  return PyModule_Create(&cutegemm::definition);
}
