//! Plugins that are asked for.

use ronde_wire::{Codec, Collective, PluginCall, PluginValue, ReduceOp, limits};

use super::ConvertError;
use crate::v1;
use crate::v1::plugin::parameter::Value;

/// Parses the name of a plugin with its parameters.
///
/// # Errors
/// [`ConvertError::TooLarge`] for a limit, [`ConvertError::Missing`] for a parameter without a value.
pub(super) fn plugin_from(message: v1::Plugin) -> Result<PluginCall, ConvertError> {
    // A name, "@", a version.
    let name_max = limits::PLUGIN_NAME_BYTES_MAX + 1 + limits::PLUGIN_VERSION_BYTES_MAX;
    bounded("plugin", message.name.len(), name_max)?;
    bounded("plugin parameters", message.parameters.len(), limits::PLUGIN_PARAMETERS_MAX)?;
    let parameters = message.parameters.into_iter().map(parameter_from).collect::<Result<_, _>>()?;
    Ok(PluginCall { name: message.name, parameters })
}

/// The codec of a request that may ask for a plugin.
///
/// # Errors
/// [`ConvertError::Plugin`] for two codecs, a reduction by a plugin without one, or a plugin where there is nothing for one to do.
pub(super) fn codec(codec: Codec, collective: &Collective, plugin: bool) -> Result<Codec, ConvertError> {
    let refused = |what| Err(ConvertError::Plugin { what });
    match (collective.reduce_op(), plugin) {
        (Some(ReduceOp::Plugin), false) => refused("a reduction by a plugin was asked for, and no plugin; say which"),
        (Some(ReduceOp::Plugin), true) | (_, false) => Ok(codec),
        (Some(_), true) if codec != Codec::None => {
            refused("a plugin and a codec were asked for; leave one of them out")
        }
        (Some(_), true) => Ok(Codec::Plugin),
        (None, true) => refused("an operation that does not reduce takes no plugin; only ALLREDUCE does"),
    }
}

fn parameter_from(message: v1::plugin::Parameter) -> Result<(String, PluginValue), ConvertError> {
    bounded("a plugin parameter's name", message.name.len(), limits::PLUGIN_NAME_BYTES_MAX)?;
    let value = match message.value {
        None => return Err(ConvertError::Missing { field: "plugin parameter", hint: "give it a value" }),
        Some(Value::Int(value)) => PluginValue::Int(value),
        Some(Value::Float(value)) => PluginValue::Float(value),
        Some(Value::Bool(value)) => PluginValue::Bool(value),
        Some(Value::Choice(value)) => {
            bounded("a plugin parameter's value", value.len(), limits::PLUGIN_NAME_BYTES_MAX)?;
            PluginValue::Choice(value)
        }
    };
    Ok((message.name, value))
}

fn bounded(field: &'static str, given: usize, max: usize) -> Result<(), ConvertError> {
    if given <= max { Ok(()) } else { Err(ConvertError::TooLarge { field, given: given as u64, max: max as u64 }) }
}

impl From<PluginCall> for v1::Plugin {
    fn from(call: PluginCall) -> Self {
        let parameter = |(name, value)| {
            let value = match value {
                PluginValue::Int(value) => Value::Int(value),
                PluginValue::Float(value) => Value::Float(value),
                PluginValue::Bool(value) => Value::Bool(value),
                PluginValue::Choice(value) => Value::Choice(value),
            };
            v1::plugin::Parameter { name, value: Some(value) }
        };
        Self { name: call.name, parameters: call.parameters.into_iter().map(parameter).collect() }
    }
}
