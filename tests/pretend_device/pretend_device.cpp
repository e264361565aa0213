// The torch backend "pretend": see pretend_device.py.
#include <torch/extension.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/NativeFunctions.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <cstdlib>
#include <mutex>
#include <set>

namespace {
using at::Tensor; using c10::Device; using c10::DeviceType; using c10::DispatchKeySet;
constexpr auto PU = DeviceType::PrivateUse1;
thread_local c10::DeviceIndex current = 0;
std::atomic<int64_t> n_waits{0}, n_ops{0};

bool no_double() { static bool b = std::getenv("PRETEND_NO_FLOAT64") != nullptr; return b; }
void check_type(c10::ScalarType t) {
  TORCH_CHECK_TYPE(!no_double() || (t != at::kDouble && t != at::kComplexDouble),
    "Cannot convert a pretend Tensor to float64 dtype as the pretend framework doesn't support float64 (as on MPS)");
}

c10::DeviceIndex count() {
  static int n = std::getenv("PRETEND_DEVICES") ? std::atoi(std::getenv("PRETEND_DEVICES")) : 2;
  return n;
}

struct Alloc final : c10::Allocator {
  c10::DataPtr allocate(size_t n) override {
    void* p = nullptr;
    if (posix_memalign(&p, 64, n ? n : 1)) throw std::bad_alloc();
    return {p, p, &std::free, Device(PU, current)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &std::free; }
  void copy_data(void* d, const void* s, size_t n) const override { std::memcpy(d, s, n); }
};
Alloc alloc;
REGISTER_ALLOCATOR(PU, &alloc);

// Pinned memory is ordinary memory whose address is known here.
std::set<const void*> pinned; std::mutex pinned_lock;
void free_pinned(void* p) { { std::lock_guard<std::mutex> l(pinned_lock); pinned.erase(p); } std::free(p); }
struct PinnedAlloc final : c10::Allocator {
  c10::DataPtr allocate(size_t n) override {
    void* p = nullptr;
    if (posix_memalign(&p, 64, n ? n : 1)) throw std::bad_alloc();
    { std::lock_guard<std::mutex> l(pinned_lock); pinned.insert(p); }
    return {p, p, &free_pinned, Device(DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* d, const void* s, size_t n) const override { std::memcpy(d, s, n); }
};
PinnedAlloc pinned_alloc;

struct Guard final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return PU; }
  Device exchangeDevice(Device d) const override { auto o = current; setDevice(d); return {PU, o}; }
  Device getDevice() const override { return {PU, current}; }
  void setDevice(Device d) const override {
    TORCH_CHECK(d.type() == PU && d.index() < count(), "pretend: no device ", d);
    if (d.index() >= 0) current = d.index();
  }
  void uncheckedSetDevice(Device d) const noexcept override { if (d.index() >= 0) current = d.index(); }
  c10::Stream getStream(Device d) const override { return c10::Stream(c10::Stream::DEFAULT, Device(PU, d.index() < 0 ? current : d.index())); }
  c10::Stream getDefaultStream(Device d) const override { return getStream(d); }
  c10::Stream getNewStream(Device d, int) const override { return getStream(d); }
  c10::Stream getStreamFromGlobalPool(Device d, bool) const override { return getStream(d); }
  c10::Stream exchangeStream(c10::Stream s) const override { return s; }
  c10::DeviceIndex deviceCount() const noexcept override { return count(); }
  void record(void** e, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override { static int x; *e = &x; }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override { ++n_waits; }
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override { ++n_waits; }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Gen final : c10::GeneratorImpl {
  at::Generator inner = at::detail::createCPUGenerator();
  explicit Gen(c10::DeviceIndex i) : GeneratorImpl(Device(PU, i), DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}
  void set_current_seed(uint64_t s) override { inner.set_current_seed(s); }
  void set_offset(uint64_t) override { TORCH_CHECK(false, "no offset"); }
  uint64_t get_offset() const override { TORCH_CHECK(false, "no offset"); }
  uint64_t current_seed() const override { return inner.current_seed(); }
  uint64_t seed() override { return inner.seed(); }
  void set_state(const c10::TensorImpl& s) override { inner.unsafeGetGeneratorImpl()->set_state(s); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return inner.unsafeGetGeneratorImpl()->get_state(); }
  GeneratorImpl* clone_impl() const override { auto* g = new Gen(device_.index()); g->inner = inner.clone(); return g; }
};
const at::Generator& default_generator(c10::DeviceIndex i) {
  static std::vector<at::Generator> all = [] {
    std::vector<at::Generator> v;
    for (int k = 0; k < count(); ++k) v.push_back(at::make_generator<Gen>(k));
    return v; }();
  return all.at(i < 0 ? current : i);
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return count(); }
  void setCurrentDevice(c10::DeviceIndex i) const override { Guard().setDevice({PU, i}); }
  c10::DeviceIndex getCurrentDevice() const override { return current; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex i) const override { auto o = current; current = i; return o; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex i) const override { auto o = current; if (i >= 0) current = i; return o; }
  at::Device getDeviceFromPtr(void*) const override { return {PU, current}; }
  bool isPinnedPtr(const void* p) const override { std::lock_guard<std::mutex> l(pinned_lock); return pinned.count(p) > 0; }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_alloc; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex i) const override { return default_generator(i); }
  at::Generator getNewGenerator(c10::DeviceIndex i) const override { return at::make_generator<Gen>(i < 0 ? current : i); }
  void resizePrivateUse1Bytes(const c10::Storage& s, size_t n) const override {
    auto old = current; if (s.device().index() >= 0) current = s.device().index();
    auto fresh = alloc.allocate(n);
    current = old;
    std::memcpy(fresh.get(), s.data(), std::min(n, s.nbytes()));
    s.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(fresh));
    s.unsafeGetStorageImpl()->set_nbytes(n);
  }
};

struct On { c10::DeviceIndex old = current; explicit On(Device d) { if (d.index() >= 0) current = d.index(); } ~On() { current = old; } };
bool ours(const Tensor& t) { return t.defined() && t.device().type() == PU; }

// The same memory as a tensor of the CPU.
Tensor host_view(const Tensor& t) {
  if (!ours(t)) return t;
  auto* keep = new c10::Storage(t.storage());
  c10::DataPtr p(const_cast<void*>(t.storage().data()), keep,
                 [](void* k) { delete static_cast<c10::Storage*>(k); }, Device(DeviceType::CPU));
  c10::Storage s(c10::Storage::use_byte_size_t(), t.storage().nbytes(), std::move(p), c10::GetCPUAllocator(), true);
  auto out = at::detail::make_tensor<c10::TensorImpl>(std::move(s), DispatchKeySet(c10::DispatchKey::CPU), t.dtype());
  auto* impl = out.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
  if (t.is_conj()) impl->_set_conj(true);
  if (t.is_neg()) impl->_set_neg(true);
  if (t.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  return out;
}
Tensor device_copy(const Tensor& t, Device d) {
  if (!t.defined() || ours(t)) return t;
  check_type(t.scalar_type());
  auto old = current; current = d.index();
  auto size = at::detail::computeStorageNbytes(t.sizes(), t.strides(), t.dtype().itemsize());
  c10::Storage s(c10::Storage::use_byte_size_t(), size, alloc.allocate(size), &alloc, true);
  current = old;
  auto out = at::detail::make_tensor<c10::TensorImpl>(std::move(s), DispatchKeySet(c10::DispatchKey::PrivateUse1), t.dtype());
  out.unsafeGetTensorImpl()->set_sizes_and_strides(t.sizes(), t.strides(), 0);
  if (t.unsafeGetTensorImpl()->is_wrapped_number()) out.unsafeGetTensorImpl()->set_wrapped_number(true);
  host_view(out).copy_(t);
  return out;
}

void fallback(const c10::OperatorHandle& op, DispatchKeySet, torch::jit::Stack* stack) {
  ++n_ops;
  const auto& schema = op.schema();
  const auto n = schema.arguments().size();
  const auto start = stack->size() - n;
  const std::string& name = schema.name();
  std::vector<c10::IValue> given(stack->begin() + start, stack->end());
  bool pointwise = op.hasTag(at::Tag::pointwise);
  bool indexing = name.find("index_put") != std::string::npos || name == "aten::index" ||
                  name == "aten::_unsafe_index";
  c10::optional<Device> where;
  auto see = [&](const Tensor& t) { if (ours(t)) {
      TORCH_CHECK(!where || *where == t.device(), "Expected all tensors to be on the same device, but found at least two devices, ",
                  *where, " and ", t.device(), "! (", name, ")");
      where = t.device(); } };
  auto each = [&](auto f) { for (size_t i = 0; i < n; ++i) { auto& v = given[i];
      if (v.isTensor()) { if (v.toTensor().defined()) f(i, v.toTensor()); }
      else if (v.isTensorList()) for (const auto& t : v.toTensorVector()) { if (t.defined()) f(i, t); }
      else if (v.isOptionalTensorList()) for (const c10::optional<Tensor>& t : v.toOptionalTensorList().vec()) if (t && t->defined()) f(i, *t); } };
  each([&](size_t, const Tensor& t) { see(t); });
  for (auto& v : given) if (v.isDevice() && v.toDevice().type() == PU && !where)
      where = Device(PU, v.toDevice().index() < 0 ? current : v.toDevice().index());
  TORCH_CHECK(where, "pretend: no tensor of the device in ", name);
  bool self_ours = n && given[0].isTensor() && ours(given[0].toTensor());
  each([&](size_t i, const Tensor& t) {
    if (t.device().type() != DeviceType::CPU) return;
    const auto* info = schema.arguments()[i].alias_info();
    bool written = info && info->isWrite();
    bool fine = (indexing && i > 0 && self_ours && !(name.find("index_put") != std::string::npos && i == 2 && t.dim() > 0)) ||
                (t.dim() == 0 && pointwise && !written) ||
                (t.dim() == 0 && name.rfind("aten::_foreach", 0) == 0) ||
                (t.dim() == 0 && name == "aten::fill_") || t.unsafeGetTensorImpl()->is_wrapped_number();
    TORCH_CHECK(fine, "Expected all tensors to be on the same device, but found at least two devices, ",
                *where, " and cpu! (argument ", schema.arguments()[i].name(), " of ", name, ")"); });
  bool seeded = op.hasTag(at::Tag::nondeterministic_seeded);
  std::vector<std::pair<Tensor, Tensor>> written;
  at::Generator mine;
  for (size_t i = 0; i < n; ++i) {
    auto& v = given[i];
    const auto& arg = schema.arguments()[i];
    bool writes = arg.alias_info() && arg.alias_info()->isWrite();
    auto view = [&](const Tensor& t) { auto h = host_view(t); if (writes && ours(t)) written.emplace_back(t, h); return h; };
    if (v.isTensor()) { (*stack)[start + i] = view(v.toTensor()); }
    else if (v.isTensorList()) { std::vector<Tensor> l; for (const auto& t : v.toTensorVector()) l.push_back(view(t)); (*stack)[start + i] = c10::List<Tensor>(l); }
    else if (v.isOptionalTensorList()) { c10::List<c10::optional<Tensor>> l; for (const c10::optional<Tensor>& t : v.toOptionalTensorList().vec()) l.push_back(t ? c10::optional<Tensor>(host_view(*t)) : t); (*stack)[start + i] = l; }
    else if (v.isDevice()) { (*stack)[start + i] = Device(DeviceType::CPU); }
    else if (v.isGenerator()) {
      auto g = v.toGenerator();
      TORCH_CHECK(g.device().type() == PU, "Expected a 'pretend' device type for generator but found '", g.device().type(), "' (", name, ")");
      (*stack)[start + i] = static_cast<Gen*>(g.unsafeGetGeneratorImpl())->inner; seeded = false;
    }
  }
  Tensor saved; at::Generator cpu = at::detail::getDefaultCPUGenerator(), own;
  if (seeded) { own = static_cast<Gen*>(default_generator(where->index()).unsafeGetGeneratorImpl())->inner;
    saved = cpu.get_state(); cpu.set_state(own.get_state()); }
  try { op.redispatchBoxed(DispatchKeySet(c10::DispatchKey::CPU), stack); }
  catch (...) { if (seeded) cpu.set_state(saved); throw; }
  if (seeded) { own.set_state(cpu.get_state()); cpu.set_state(saved); }
  On on(*where);
  for (auto& [orig, host] : written) {
    if (host.sizes() == orig.sizes() && host.const_data_ptr() == orig.const_data_ptr()) continue;
    at::native::resize_impl_cpu_(orig.unsafeGetTensorImpl(), host.sizes(), c10::nullopt);
    orig.unsafeGetTensorImpl()->set_sizes_and_strides(host.sizes(), host.strides());
    if (host.const_data_ptr() != orig.const_data_ptr()) host_view(orig).copy_(host);
  }
  const auto rets = schema.returns().size();
  const auto base = stack->size() - rets;
  for (size_t r = 0; r < rets; ++r) {
    auto& v = (*stack)[base + r];
    const auto* info = schema.returns()[r].alias_info();
    if (v.isTensor()) {
      if (info && info->isWrite()) {
        for (size_t i = 0; i < n; ++i) { const auto* a = schema.arguments()[i].alias_info(); if (a && *a == *info && given[i].isTensor()) v = given[i]; }
      } else { TORCH_CHECK(!info, "pretend: a view that is not implemented: ", name); v = device_copy(v.toTensor(), *where); }
    } else if (v.isTensorList()) {
      TORCH_CHECK(!info, "pretend: views that are not implemented: ", name);
      std::vector<Tensor> l; for (const auto& t : v.toTensorVector()) l.push_back(device_copy(t, *where));
      v = c10::List<Tensor>(l);
    }
  }
}

Tensor empty(c10::IntArrayRef size, c10::optional<c10::ScalarType> dtype, c10::optional<c10::Layout>, c10::optional<Device> d,
             c10::optional<bool>, c10::optional<c10::MemoryFormat> f) {
  check_type(c10::dtype_or_default(dtype));
  auto old = current; if (d && d->index() >= 0) Guard().setDevice(*d);
  Tensor out = at::detail::empty_generic(size, &alloc, DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype), f);
  current = old; return out;
}
Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, c10::optional<c10::ScalarType> dtype, c10::optional<c10::Layout>, c10::optional<Device> d, c10::optional<bool>) {
  check_type(c10::dtype_or_default(dtype));
  auto old = current; if (d && d->index() >= 0) Guard().setDevice(*d);
  Tensor out = at::detail::empty_strided_generic(size, stride, &alloc, DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
  current = old; return out;
}
Tensor copy_from(const Tensor& self, const Tensor& dst, bool) {
  if (ours(self) && !ours(dst)) ++n_waits;
  host_view(dst).copy_(host_view(self)); return dst;
}
Tensor copy_from_and_resize(const Tensor& self, const Tensor& dst) { dst.resize_(self.sizes()); return copy_from(self, dst, false); }
at::Scalar local_scalar(const Tensor& self) { ++n_waits; return at::native::_local_scalar_dense_cpu(host_view(self)); }
const Tensor& resize_(const Tensor& self, c10::SymIntArrayRef size, c10::optional<c10::MemoryFormat> f) {
  On on(self.device());
  at::native::resize_impl_cpu_(self.unsafeGetTensorImpl(), C10_AS_INTARRAYREF_SLOW(size), c10::nullopt); return self;
}
Tensor& set_storage(Tensor& self, c10::Storage s, c10::SymInt offset, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(s));
  auto sz = C10_AS_INTARRAYREF_SLOW(size); auto st = C10_AS_INTARRAYREF_SLOW(stride);
  if (st.empty() && !sz.empty()) { self.unsafeGetTensorImpl()->set_storage_offset(offset.expect_int()); self.unsafeGetTensorImpl()->set_sizes_contiguous(sz); }
  else self.unsafeGetTensorImpl()->set_sizes_and_strides(sz, st, offset.expect_int());
  return self;
}
Tensor& set_source(Tensor& self, c10::Storage s) {
  int64_t n = s.nbytes() / self.dtype().itemsize();
  return set_storage(self, std::move(s), 0, {c10::SymInt(n)}, {c10::SymInt(1)});
}
Tensor& set_tensor(Tensor& self, const Tensor& src) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(src.storage());
  self.unsafeGetTensorImpl()->set_sizes_and_strides(src.sizes(), src.strides(), src.storage_offset()); return self;
}
bool is_set_to(const Tensor& a, const Tensor& b) { return at::native::is_set_to(host_view(a), host_view(b)); }
Tensor unfold_(const Tensor& self, int64_t d, int64_t s, int64_t t) { return at::native::unfold(self, d, s, t); }
Tensor real_(const Tensor& self) { return at::native::view_as_real(self); }
Tensor complex_(const Tensor& self) { return at::native::view_as_complex(self); }
Tensor strided(const Tensor& self, c10::IntArrayRef a, c10::IntArrayRef b, c10::optional<int64_t> o) { return at::native::as_strided_tensorimpl(self, a, b, o); }
Tensor viewed(const Tensor& self, c10::IntArrayRef a) { return at::native::view(self, a); }
Tensor aliased(const Tensor& self, c10::IntArrayRef a, c10::IntArrayRef b) { return at::native::_reshape_alias(self, a, b); }

// Recurrent cells: torch has no composite form of them for accelerators.
using T3 = std::tuple<Tensor, Tensor, Tensor>; using T5 = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;
Tensor with_bias(const Tensor& x, const c10::optional<Tensor>& b) { return b && b->defined() ? x + *b : x; }
T3 lstm_cell(const Tensor& ig, const Tensor& hg, const Tensor& cx, const c10::optional<Tensor>& bi, const c10::optional<Tensor>& bh) {
  auto p = (with_bias(ig, bi) + with_bias(hg, bh)).chunk(4, 1);
  auto i = p[0].sigmoid(), f = p[1].sigmoid(), g = p[2].tanh(), o = p[3].sigmoid();
  auto cy = f * cx + i * g;
  return {o * cy.tanh(), cy, at::cat({i, f, g, o}, 1)};
}
T3 lstm_back(const c10::optional<Tensor>& gh, const c10::optional<Tensor>& gc, const Tensor& cx, const Tensor& cy, const Tensor& ws, bool bias) {
  if (!(gh && gh->defined()) && !(gc && gc->defined())) return {};
  auto w = ws.chunk(4, 1); auto i = w[0], f = w[1], g = w[2], o = w[3]; auto t = cy.tanh();
  auto h = gh && gh->defined() ? *gh : at::zeros_like(cx);
  auto c = h * o * (1 - t * t); if (gc && gc->defined()) c = c + *gc;
  auto all = at::cat({c * g * i * (1 - i), c * cx * f * (1 - f), c * i * (1 - g * g), h * t * o * (1 - o)}, 1);
  return {all, c * f, bias ? all.sum(0) : Tensor()};
}
std::tuple<Tensor, Tensor> gru_cell(const Tensor& ig, const Tensor& hg, const Tensor& hx, const c10::optional<Tensor>& bi, const c10::optional<Tensor>& bh) {
  auto a = with_bias(ig, bi).chunk(3, 1), b = with_bias(hg, bh).chunk(3, 1);
  auto r = (a[0] + b[0]).sigmoid(), z = (a[1] + b[1]).sigmoid(), n = (a[2] + r * b[2]).tanh();
  return {(hx - n) * z + n, at::cat({r, z, n, hx, b[2]}, 1)};
}
T5 gru_back(const Tensor& gh, const Tensor& ws, bool bias) {
  auto w = ws.chunk(5, 1); auto r = w[0], z = w[1], n = w[2], hx = w[3], hn = w[4];
  auto gn = gh * (1 - z) * (1 - n * n), gz = gh * (hx - n) * z * (1 - z), gr = gn * hn * r * (1 - r);
  auto gi = at::cat({gr, gz, gn}, 1), gg = at::cat({gr, gz, gn * r}, 1);
  return {gi, gg, gh * z, bias ? gi.sum(0) : Tensor(), bias ? gg.sum(0) : Tensor()};
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_thnn_fused_lstm_cell", &lstm_cell); m.impl("_thnn_fused_lstm_cell_backward_impl", &lstm_back);
  m.impl("_thnn_fused_gru_cell", &gru_cell); m.impl("_thnn_fused_gru_cell_backward", &gru_back);
  m.impl("empty.memory_format", &empty); m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", &strided); m.impl("view", &viewed); m.impl("_reshape_alias", &aliased);
  m.impl("unfold", &unfold_); m.impl("view_as_real", &real_); m.impl("view_as_complex", &complex_);
  m.impl("_copy_from", &copy_from); m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &local_scalar); m.impl("resize_", &resize_);
  m.impl("set_.source_Storage_storage_offset", &set_storage); m.impl("set_.source_Storage", &set_source);
  m.impl("set_.source_Tensor", &set_tensor); m.impl("is_set_to", &is_set_to);
  auto boxed = torch::CppFunction::makeFromBoxedFunction<&fallback>;
  m.impl("convolution_overrideable", boxed());
  m.impl("convolution", boxed()); m.impl("convolution_backward", boxed());
}
TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
#define LOW(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
  AT_FORALL_LOWER_PRECISION_FP(LOW)
#define FULL(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
  AT_FORALL_FP32(FULL)
#define PROMOTE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
  AT_FORALL_PROMOTE(PROMOTE)
}
}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  static Hooks hooks;
  at::RegisterPrivateUse1HooksInterface(&hooks);
  m.def("count", [] { return int(count()); });
  m.def("current", [] { return int(current); });
  m.def("set_device", [](int i) { Guard().setDevice(Device(PU, i)); });
  m.def("generator", [](int i) { return default_generator(i); });
  m.def("waits", [] { return n_waits.load(); });
  m.def("ops", [] { return n_ops.load(); });
}
