//! One copy of the code that maps and visits a module's parameters, for any mapper and visitor.

use burn::module::{
    AutodiffModule, Content, Devices, DisplaySettings, HasAutodiffModule, Module, ModuleDisplay,
    ModuleDisplayDefault, ModuleMapper, ModuleVisitor, Param,
};
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::{Bool, Int, Tensor};
use std::any::Any;
use std::ops::Deref;

/// A module whose parameters every visitor and mapper reaches through one trait object; else it is the module
/// that it derefs to.
///
/// A derived module has a copy of `map` and `visit` for each mapper and visitor: over all mixers, on every backend, a
/// twentieth of a program and of the time to build it.
#[derive(Debug, Clone)]
pub struct Erased<M>(M);

impl<M> From<M> for Erased<M> {
    fn from(module: M) -> Self {
        Self(module)
    }
}

impl<M> Deref for Erased<M> {
    type Target = M;

    fn deref(&self) -> &M {
        &self.0
    }
}

/// A mapper whose type is forgotten.
trait Map {
    fn enter(&mut self, name: &str, container: &str);
    fn exit(&mut self, name: &str, container: &str);
    /// Puts the mapped parameter in the place of `param`, an `Option` of one.
    fn map(&mut self, param: &mut dyn Any);
}

/// A visitor whose type is forgotten.
trait Visit {
    fn enter(&mut self, name: &str, container: &str);
    fn exit(&mut self, name: &str, container: &str);
    fn visit(&mut self, param: &dyn Any);
}

/// Tries what a parameter can be, up to tensors of rank 6.
macro_rules! for_each_kind {
    ($try:ident) => {
        for_each_kind!($try, 1, 2, 3, 4, 5, 6);
        unreachable!("a parameter is a tensor of rank 1 to 6");
    };
    ($try:ident, $($rank:literal),+) => {$(
        $try!(Tensor<B, $rank>, map_float, visit_float);
        $try!(Tensor<B, $rank, Int>, map_int, visit_int);
        $try!(Tensor<B, $rank, Bool>, map_bool, visit_bool);
    )+};
}

/// The trait object's maker: its backend is the mapper's.
struct Of<'a, B, W>(&'a mut W, std::marker::PhantomData<B>);

impl<B: Backend, W: ModuleMapper<B>> Map for Of<'_, B, W> {
    fn enter(&mut self, name: &str, container: &str) {
        self.0.enter_module(name, container);
    }

    fn exit(&mut self, name: &str, container: &str) {
        self.0.exit_module(name, container);
    }

    fn map(&mut self, param: &mut dyn Any) {
        macro_rules! attempt {
            ($tensor:ty, $map:ident, $visit:ident) => {
                if let Some(param) = param.downcast_mut::<Option<Param<$tensor>>>() {
                    *param = param.take().map(|param| self.0.$map(param));
                    return;
                }
            };
        }
        for_each_kind!(attempt);
    }
}

impl<B: Backend, W: ModuleVisitor<B>> Visit for Of<'_, B, W> {
    fn enter(&mut self, name: &str, container: &str) {
        self.0.enter_module(name, container);
    }

    fn exit(&mut self, name: &str, container: &str) {
        self.0.exit_module(name, container);
    }

    fn visit(&mut self, param: &dyn Any) {
        macro_rules! attempt {
            ($tensor:ty, $map:ident, $visit:ident) => {
                if let Some(param) = param.downcast_ref::<Param<$tensor>>() {
                    return self.0.$visit(param);
                }
            };
        }
        for_each_kind!(attempt);
    }
}

/// The one mapper and the one visitor that layers see.
struct Dynamic<'a, W: ?Sized>(&'a mut W);

impl Dynamic<'_, dyn Map + '_> {
    fn mapped<P: 'static>(&mut self, param: P) -> P {
        let mut param = Some(param);
        self.0.map(&mut param);
        param.expect("a mapper gives a parameter back")
    }
}

impl<B: Backend> ModuleMapper<B> for Dynamic<'_, dyn Map + '_> {
    fn enter_module(&mut self, name: &str, container: &str) {
        self.0.enter(name, container);
    }

    fn exit_module(&mut self, name: &str, container: &str) {
        self.0.exit(name, container);
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        self.mapped(param)
    }

    fn map_int<const D: usize>(
        &mut self,
        param: Param<Tensor<B, D, Int>>,
    ) -> Param<Tensor<B, D, Int>> {
        self.mapped(param)
    }

    fn map_bool<const D: usize>(
        &mut self,
        param: Param<Tensor<B, D, Bool>>,
    ) -> Param<Tensor<B, D, Bool>> {
        self.mapped(param)
    }
}

impl<B: Backend> ModuleVisitor<B> for Dynamic<'_, dyn Visit + '_> {
    fn enter_module(&mut self, name: &str, container: &str) {
        self.0.enter(name, container);
    }

    fn exit_module(&mut self, name: &str, container: &str) {
        self.0.exit(name, container);
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        self.0.visit(param);
    }

    fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<B, D, Int>>) {
        self.0.visit(param);
    }

    fn visit_bool<const D: usize>(&mut self, param: &Param<Tensor<B, D, Bool>>) {
        self.0.visit(param);
    }
}

impl<B: Backend, M: Module<B>> Module<B> for Erased<M> {
    type Record = M::Record;

    fn map<W: ModuleMapper<B>>(self, mapper: &mut W) -> Self {
        let mut mapper = Of(mapper, std::marker::PhantomData::<B>);
        let mut dynamic: Dynamic<'_, dyn Map + '_> = Dynamic(&mut mapper);
        Self(self.0.map(&mut dynamic))
    }

    fn visit<W: ModuleVisitor<B>>(&self, visitor: &mut W) {
        let mut visitor = Of(visitor, std::marker::PhantomData::<B>);
        let mut dynamic: Dynamic<'_, dyn Visit + '_> = Dynamic(&mut visitor);
        self.0.visit(&mut dynamic);
    }

    fn collect_devices(&self, devices: Devices<B>) -> Devices<B> {
        self.0.collect_devices(devices)
    }

    fn fork(self, device: &B::Device) -> Self {
        Self(self.0.fork(device))
    }

    fn to_device(self, device: &B::Device) -> Self {
        Self(self.0.to_device(device))
    }

    fn load_record(self, record: Self::Record) -> Self {
        Self(self.0.load_record(record))
    }

    fn into_record(self) -> Self::Record {
        self.0.into_record()
    }
}

impl<B: AutodiffBackend, M: AutodiffModule<B>> AutodiffModule<B> for Erased<M> {
    type InnerModule = Erased<M::InnerModule>;

    fn valid(&self) -> Self::InnerModule {
        Erased(self.0.valid())
    }

    fn from_inner(module: Self::InnerModule) -> Self {
        Self(M::from_inner(module.0))
    }
}

impl<B: AutodiffBackend, M: HasAutodiffModule<B>> HasAutodiffModule<B> for Erased<M>
where
    M: Module<B::InnerBackend>,
{
    type TrainModule = Erased<M::TrainModule>;
}

impl<M: ModuleDisplay> ModuleDisplayDefault for Erased<M> {
    fn content(&self, content: Content) -> Option<Content> {
        self.0.content(content)
    }

    fn num_params(&self) -> usize {
        ModuleDisplayDefault::num_params(&self.0)
    }
}

impl<M: ModuleDisplay> ModuleDisplay for Erased<M> {
    fn format(&self, settings: DisplaySettings) -> String {
        self.0.format(settings)
    }
}

#[cfg(all(test, feature = "cpu"))]
mod tests {
    use super::*;
    use crate::backend::Flex;
    use burn::module::ParamId;

    /// A module of every kind of parameter.
    #[derive(Module, Debug)]
    struct Kinds<B: Backend> {
        floats: Param<Tensor<B, 2>>,
        whole: Param<Tensor<B, 1, Int>>,
        truth: Param<Tensor<B, 3, Bool>>,
    }

    fn kinds() -> Kinds<Flex> {
        let device = Default::default();
        Kinds {
            floats: Param::from_tensor(Tensor::from_floats([[1.0, -2.0]], &device)),
            whole: Param::initialized(ParamId::new(), Tensor::from_ints([3, 4, 5], &device)),
            truth: Param::initialized(
                ParamId::new(),
                Tensor::from_bool([[[true]]].into(), &device),
            ),
        }
    }

    /// Parameters and modules that a visitor meets, in order.
    #[derive(Default)]
    struct Seen(Vec<String>);

    impl<B: Backend> ModuleVisitor<B> for Seen {
        fn enter_module(&mut self, name: &str, container: &str) {
            self.0.push(format!("{name} of {container}"));
        }

        fn exit_module(&mut self, name: &str, _container: &str) {
            self.0.push(format!("end of {name}"));
        }

        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
            self.0.push(format!("floats {:?} {}", param.val().dims(), param.id));
        }

        fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<B, D, Int>>) {
            self.0.push(format!("ints {:?} {}", param.val().dims(), param.id));
        }

        fn visit_bool<const D: usize>(&mut self, param: &Param<Tensor<B, D, Bool>>) {
            self.0.push(format!("bools {:?} {}", param.val().dims(), param.id));
        }
    }

    /// Turns the sign, adds one, negates.
    struct Change;

    impl<B: Backend> ModuleMapper<B> for Change {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
            param.map(|x| -x)
        }

        fn map_int<const D: usize>(
            &mut self,
            param: Param<Tensor<B, D, Int>>,
        ) -> Param<Tensor<B, D, Int>> {
            param.map(|x| x + 1)
        }

        fn map_bool<const D: usize>(
            &mut self,
            param: Param<Tensor<B, D, Bool>>,
        ) -> Param<Tensor<B, D, Bool>> {
            param.map(|x| x.bool_not())
        }
    }

    fn seen(module: &impl Module<Flex>) -> Vec<String> {
        let mut seen = Seen::default();
        module.visit(&mut seen);
        seen.0
    }

    #[test]
    fn a_visitor_meets_what_it_meets_in_the_module_itself() {
        let module = kinds();
        let erased = Erased(module.clone());
        assert_eq!(seen(&erased), seen(&module));
        assert_eq!(seen(&module).len(), 9);
        assert_eq!(Module::<Flex>::num_params(&erased), Module::<Flex>::num_params(&module));
        let text = |display: &dyn Fn(DisplaySettings) -> String| display(DisplaySettings::new());
        assert_eq!(text(&|s| erased.format(s)), text(&|s| module.format(s)));
    }

    #[test]
    fn a_mapper_changes_every_kind_of_parameter() {
        let module = kinds();
        let changed = Module::<Flex>::map(Erased(module.clone()), &mut Change);
        assert_eq!(seen(&changed), seen(&module));
        assert_eq!(changed.floats.val().into_data().to_vec::<f32>().unwrap(), [-1.0, 2.0]);
        assert_eq!(changed.whole.val().into_data().iter::<i64>().collect::<Vec<_>>(), [4, 5, 6]);
        assert_eq!(changed.truth.val().into_data().iter::<bool>().collect::<Vec<_>>(), [false]);
    }
}
