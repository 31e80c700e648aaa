// Shows the description of the API with Swagger UI.
SwaggerUIBundle({ url: "/openapi.json", dom_id: "#swagger-ui", deepLinking: true, defaultModelsExpandDepth: 0, validatorUrl: null });
