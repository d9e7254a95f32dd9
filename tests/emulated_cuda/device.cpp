// A CUDA device that is made of the CPU's memory, for torch builds without CUDA: `cuda` tensors compute what CPU tensors do,
// and operations refuse tensors of two devices as they do on a GPU. See __main__.py.

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <atomic>
#include <set>

namespace {

using at::Tensor;
using c10::DataPtr;
using c10::Device;
using c10::DeviceIndex;
using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::Storage;

const Device kDevice(c10::DeviceType::CUDA, 0);

// ------------------------------------------------------------------------------------------------- memory, counted

std::atomic<int64_t> allocated{0}, peak{0};

void count(int64_t bytes) {
  int64_t now = allocated += bytes;
  int64_t before = peak;
  while (now > before && !peak.compare_exchange_weak(before, now)) {
  }
}

// What a storage of the device keeps alive.
template <typename Owner>
struct Counted {
  Owner owner;
  int64_t bytes;

  static DataPtr make(void* data, Owner owner, size_t size) {
    const int64_t bytes = (size + 511) / 512 * 512;  // as torch's allocator rounds
    count(bytes);
    return {data, new Counted{std::move(owner), bytes}, free, kDevice};
  }

  static void free(void* self) {
    auto* counted = static_cast<Counted*>(self);
    allocated -= counted->bytes;
    delete counted;
  }
};

struct DeviceAllocator final : c10::Allocator {
  DataPtr allocate(size_t size) override {
    DataPtr memory = c10::GetCPUAllocator()->allocate(size);
    void* data = memory.get();
    return Counted<DataPtr>::make(data, std::move(memory), size);
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t size) const override { default_copy_data(to, from, size); }
} allocator;

// Of the zeros without data that forward-mode differentiation makes.
struct ZeroAllocator final : c10::Allocator {
  static void nothing(void*) {}
  DataPtr allocate(size_t) override { return {nullptr, nullptr, nothing, kDevice}; }
  c10::DeleterFnPtr raw_deleter() const override { return nothing; }
  void copy_data(void*, const void*, size_t) const override {}
} zero_allocator;

// --------------------------------------------------------------------- what torch asks of a device: one, without streams

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kDevice.type(); }
  Device exchangeDevice(Device) const override { return kDevice; }
  Device getDevice() const override { return kDevice; }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  c10::Stream getStream(Device device) const override { return c10::Stream(c10::Stream::UNSAFE, device, 0); }
  c10::Stream getDefaultStream(Device device) const override { return c10::Stream(c10::Stream::UNSAFE, device, 0); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return stream; }
  DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void**, const c10::Stream&, const DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
};
c10::impl::DeviceGuardImplRegistrar guard(kDevice.type(), new Guard());

struct Hooks final : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex current_device() const override { return 0; }
  DeviceIndex deviceCount() const override { return 1; }
  int getNumGPUs() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(DeviceIndex) const override {}
  DeviceIndex exchangeDevice(DeviceIndex) const override { return 0; }
  DeviceIndex maybeExchangeDevice(DeviceIndex) const override { return 0; }
  void deviceSynchronize(DeviceIndex) const override {}
  c10::Allocator* getPinnedMemoryAllocator() const override { return c10::GetCPUAllocator(); }
  c10::Allocator* getCUDADeviceAllocator() const override { return &allocator; }
  at::Generator getNewGenerator(DeviceIndex) const override { return at::make_generator<at::CPUGeneratorImpl>(); }
  const at::Generator& getDefaultGenerator(DeviceIndex) const override {
    static const at::Generator generator = at::make_generator<at::CPUGeneratorImpl>();
    return generator;
  }
};

// ------------------------------------------------------------------------------- operations, run by the CPU's kernels

Tensor view_of(Storage storage, DispatchKey key, const Tensor& like) {
  Tensor result = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), DispatchKeySet(key), like.dtype());
  result.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  if (like.is_conj()) result._set_conj(true);
  if (like.is_neg()) result._set_neg(true);
  return result;
}

// The same memory as a tensor of the CPU.
Tensor on_cpu(const Tensor& tensor) {
  auto* owner = new Storage(tensor.storage());
  DataPtr data(owner->mutable_data(), owner, [](void* p) { delete static_cast<Storage*>(p); }, c10::kCPU);
  Storage storage(Storage::use_byte_size_t(), owner->nbytes(), std::move(data), c10::GetCPUAllocator(), true);
  return view_of(std::move(storage), DispatchKey::CPU, tensor);
}

// The same memory as a storage of the device.
Storage on_device(const Storage& storage) {
  DataPtr data = Counted<Storage>::make(storage.mutable_data(), storage, storage.nbytes());
  return {Storage::use_byte_size_t(), storage.nbytes(), std::move(data), &allocator, true};
}

bool takes_cpu_indices(const std::string& name) {
  static const std::set<std::string> names{"aten::index", "aten::index_put_", "aten::_index_put_impl_"};
  return names.count(name) > 0;
}

void run_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const c10::FunctionSchema& schema = op.schema();
  std::vector<std::pair<Tensor, Tensor>> seen;  // on the CPU, and as it was
  bool is_ours = false;
  auto enter = [&](const Tensor& tensor, bool is_index) -> Tensor {
    if (tensor.defined() && tensor.is_cuda()) {
      is_ours = true;
      seen.emplace_back(on_cpu(tensor), tensor);
      return seen.back().first;
    }
    TORCH_CHECK(
        !tensor.defined() || tensor.dim() == 0 || (is_index && takes_cpu_indices(schema.name())),
        schema.name(), ": Expected all tensors to be on the same device, and one of shape ", tensor.sizes(), " is on ", tensor.device());
    return tensor;
  };
  auto leave = [&](const Tensor& tensor, bool) -> Tensor {
    if (!tensor.defined() || !tensor.is_cpu() || !is_ours) return tensor;
    for (auto& [own, original] : seen) {
      if (own.is_same(tensor)) return original;
    }
    for (auto& [own, original] : seen) {
      const bool is_view = tensor.storage().data() && tensor.storage().data() == own.storage().data();
      if (is_view) return view_of(original.storage(), DispatchKey::CUDA, tensor);
    }
    return view_of(on_device(tensor.storage()), DispatchKey::CUDA, tensor);
  };
  auto convert = [](c10::IValue& value, const auto& one) {
    if (value.isTensor()) {
      value = one(value.toTensor(), false);
    } else if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& tensor : value.toTensorVector()) list.push_back(one(tensor, false));
      value = list;
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> list;
      for (const auto& tensor : value.toOptionalTensorVector()) {
        list.push_back(tensor ? std::optional<Tensor>(one(*tensor, true)) : std::nullopt);
      }
      value = list;
    }
  };

  for (size_t i = stack->size() - schema.arguments().size(); i < stack->size(); ++i) {
    c10::IValue& value = (*stack)[i];
    convert(value, enter);
    if (value.isDevice() && value.toDevice().is_cuda()) {
      is_ours = true;
      value = Device(c10::kCPU);
    }
  }
  op.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), stack);
  for (auto& [own, original] : seen) {  // out= may have been resized
    const bool moved = own.storage().data() != original.storage().data();
    if (!moved && own.sizes() == original.sizes()) continue;
    auto* impl = original.unsafeGetTensorImpl();
    if (moved) impl->set_storage_keep_dtype(on_device(own.storage()));
    impl->set_sizes_and_strides(own.sizes(), own.strides(), own.storage_offset());
  }
  for (size_t i = stack->size() - schema.returns().size(); i < stack->size(); ++i) convert((*stack)[i], leave);
}

// ------------------------------------------------------------------------ operations that the CPU's kernels cannot run

using Type = std::optional<at::ScalarType>;
using Layout = std::optional<at::Layout>;
using Where = std::optional<Device>;
using Flag = std::optional<bool>;
using Format = std::optional<at::MemoryFormat>;

at::ScalarType type_of(Type type) { return type.value_or(at::get_default_dtype_as_scalartype()); }

Tensor empty(c10::SymIntArrayRef size, Type type, Layout, Where, Flag, Format format) {
  return at::detail::empty_generic(
      C10_AS_INTARRAYREF_SLOW(size), &allocator, DispatchKeySet(DispatchKey::CUDA), type_of(type), format);
}

Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, Type type, Layout, Where, Flag) {
  return at::detail::empty_strided_generic(
      C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &allocator, DispatchKeySet(DispatchKey::CUDA), type_of(type));
}

Tensor efficient_zeros(c10::SymIntArrayRef size, Type type, Layout, Where, Flag) {
  const auto keys = DispatchKeySet(DispatchKey::CUDA) | DispatchKeySet(DispatchKey::ZeroTensor);
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &zero_allocator, keys, type_of(type), std::nullopt);
}

Tensor& copy(Tensor& self, const Tensor& source, bool) {
  at::AutoDispatchBelowADInplaceOrView below;
  (self.is_cuda() ? on_cpu(self) : self).copy_(source.is_cuda() ? on_cpu(source) : source);
  return self;
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(source.storage());
  self.unsafeGetTensorImpl()->set_sizes_and_strides(source.sizes(), source.strides(), source.storage_offset());
  return self;
}

Tensor& set_storage(Tensor& self, Storage source, c10::SymInt offset, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  TORCH_CHECK(source.device() == kDevice, "set_: the storage is on ", source.device());
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(source);
  self.unsafeGetTensorImpl()->set_sizes_and_strides(
      C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), offset.guard_int(__FILE__, __LINE__));
  return self;
}

// Products in a wider type, which the CPU does not have.
Tensor& mm_out(const Tensor& a, const Tensor& b, at::ScalarType type, Tensor& out) {
  return out.copy_(at::mm(a.to(type), b.to(type)));
}
Tensor mm_in(const Tensor& a, const Tensor& b, at::ScalarType type) { return at::mm(a.to(type), b.to(type)); }
Tensor addmm_in(
    const Tensor& c, const Tensor& a, const Tensor& b, at::ScalarType type, const at::Scalar& beta, const at::Scalar& alpha) {
  return at::addmm(c.to(type), a.to(type), b.to(type), beta, alpha);
}
Tensor& addmm_out(
    const Tensor& c, const Tensor& a, const Tensor& b, at::ScalarType type, const at::Scalar& beta, const at::Scalar& alpha, Tensor& out) {
  return out.copy_(addmm_in(c, a, b, type, beta, alpha));
}

int64_t plain_attention(const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double, bool, std::optional<double>, bool) {
  return 0;  // SDPBackend::MATH
}

void record_stream(Tensor&, c10::Stream) {}

}  // namespace

namespace at {
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, ::Hooks)
}

TORCH_LIBRARY_IMPL(_, CUDA, library) { library.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>()); }

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  at::SetAllocator(kDevice.type(), &allocator, 255);
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("_efficientzerotensor", efficient_zeros);
  library.impl("copy_", copy);
  library.impl("set_.source_Tensor", set_tensor);
  library.impl("set_.source_Storage_storage_offset", set_storage);
  library.impl("mm.dtype", mm_in);
  library.impl("mm.dtype_out", mm_out);
  library.impl("addmm.dtype", addmm_in);
  library.impl("addmm.dtype_out", addmm_out);
  library.impl("_fused_sdp_choice", plain_attention);
  library.impl("record_stream", record_stream);
}

extern "C" {
int64_t memory_allocated() { return allocated; }
int64_t max_memory_allocated() { return peak; }
void reset_peak_memory_stats() { peak = allocated.load(); }
}
