// What the headers here serve: functions for Python, and operators of torch. Each says so behind its functions, so that
// what is new needs a line of #include in module.cpp and nothing else.
#pragma once

#include <torch/library.h>

#include "interpreter.h"

namespace cutegemm {

// Functions of the module; an object of this class adds them to it.
class Methods {
 public:
  struct Method : PyMethodDef {
    using Fast = PyObject* (*)(PyObject*, PyObject* const*, Py_ssize_t);

    Method(const char* name, Fast function)
        : PyMethodDef{
              name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function)), METH_FASTCALL, nullptr} {}
    Method(const char* name, PyCFunction function, int flags) : PyMethodDef{name, function, flags, nullptr} {}
  };

  Methods(std::initializer_list<Method> given) { all().insert(all().end(), given.begin(), given.end()); }

  static std::vector<PyMethodDef>& all() { return kept<std::vector<PyMethodDef>>(); }
};

// A kernel whose lists may be None, which AOTInductor's runtime gives for an empty list.
class WithLists : public c10::OperatorKernel {
 public:
  template <typename Function>
  explicit WithLists(Function function) : kernel_(c10::KernelFunction::makeFromUnboxedFunction(function)) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
    const auto& arguments = op.schema().arguments();
    const auto given = stack->end() - static_cast<std::ptrdiff_t>(arguments.size());
    for (size_t i = 0; i < arguments.size(); ++i) {
      if (!given[i].isNone()) continue;
      const auto list = arguments[i].type()->cast<c10::ListType>();
      if (list) given[i] = c10::impl::GenericList(list->getElementType());
    }
    kernel_.callBoxed(op, keys, stack);
  }

 private:
  c10::KernelFunction kernel_;
};

template <auto function>
torch::CppFunction kernel() {
  return torch::CppFunction(TORCH_FN(function));
}

template <auto function>
torch::CppFunction kernel_with_lists() {
  return torch::CppFunction::makeFromBoxedFunctor(std::make_unique<WithLists>(TORCH_FN(function)));
}

// An operator that is served here: while it is registered, these kernels are called in place of Python's. on_device: for
// the device's key, below autograd, autocast and all modes. recorded: for autograd's; null leaves these calls to Python.
class Operator {
 public:
  using Kernel = torch::CppFunction (*)();

  Operator(const char* name, Kernel on_device, Kernel recorded) : name_(name), device_(on_device), autograd_(recorded) {
    all().push_back(this);
  }
  Operator(const Operator&) = delete;
  Operator& operator=(const Operator&) = delete;

  void serve(torch::Library& device, torch::Library& autograd) const {
    device.impl(name_, device_());
    if (autograd_) autograd.impl(name_, autograd_());
  }

  static std::vector<const Operator*>& all() { return kept<std::vector<const Operator*>>(); }

 private:
  const char* name_;
  Kernel device_, autograd_;
};

// A function of FromOperator and an operator's arguments as its kernels.
template <auto by_operator>
struct Served;

template <typename Result, typename... Given, Result (*by_operator)(FromOperator, Given...)>
struct Served<by_operator> {
  static Result on_device(Given... given) { return by_operator({}, given...); }
  static Result recorded(c10::DispatchKeySet keys, Given... given) { return by_operator({&keys}, given...); }
};

template <auto by_operator>
Operator served_by(const char* name) {
  return {name, kernel<Served<by_operator>::on_device>, kernel<Served<by_operator>::recorded>};
}

template <auto by_operator>
Operator served_with_lists_by(const char* name) {
  return {name, kernel_with_lists<Served<by_operator>::on_device>, kernel_with_lists<Served<by_operator>::recorded>};
}

inline std::vector<std::unique_ptr<torch::Library>>& registrations() {
  return kept<std::vector<std::unique_ptr<torch::Library>>>();  // torch may be gone when the process ends
}

inline void register_operators() {
  class Silent : public c10::WarningHandler {
    void process(const c10::Warning&) override {}
  } silent;  // torch would say, once for all operators, that a kernel of Python's is overridden
  const c10::WarningUtils::WarningHandlerGuard guard(&silent);
  const auto on = [](c10::DispatchKey key) -> torch::Library& {
    return *registrations().emplace_back(
        std::make_unique<torch::Library>(torch::Library::IMPL, "cutegemm", key, __FILE__, __LINE__));
  };
  torch::Library &device = on(served.key), &autograd = on(served.autograd);
  for (const Operator* each : Operator::all()) each->serve(device, autograd);
}

inline void unregister_operators() { registrations().clear(); }

}  // namespace cutegemm
